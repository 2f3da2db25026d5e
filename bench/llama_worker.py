"""llama.cpp in a process of its own, for `cpu_decode.py`: its Python may be another one, its threads rest in between.

Started with one JSON object of settings as its argument; then, for each line {"arm", "prompt", "tokens"} on stdin, a
line {"ids", "first_s", "seconds", "memory"} on stdout: greedy, exactly so many tokens, seconds from the prompt on.
Imports nothing of ours.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding


def peak_memory() -> int:
    """Bytes, of this process so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def main() -> None:
    settings = json.loads(sys.argv[1])
    options: dict[str, Any] = {
        "model_path": settings["model"],
        "n_ctx": settings["context"],
        "n_threads": settings["threads"],
        "n_threads_batch": settings["threads"],
        "n_gpu_layers": 0,
        "verbose": False,
    }
    arms = {
        "plain": {"flash_attn": False},
        "plain, flash attention": {"flash_attn": True},
        "lookup": {"flash_attn": False, "draft_model": LlamaPromptLookupDecoding()},
        "lookup, flash attention": {"flash_attn": True, "draft_model": LlamaPromptLookupDecoding()},
    }
    before = peak_memory()
    models = {name: llama_cpp.Llama(**options, **arms[name]) for name in settings["arms"]}
    facts = {"version": llama_cpp.__version__, "flags": llama_cpp.llama_print_system_info().decode()}
    print(json.dumps(facts), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        llama = models[asked["arm"]]
        llama.reset()
        ids: list[int] = []
        first = 0.0
        start = time.perf_counter()
        for token in llama.generate(asked["prompt"], temp=0.0, repeat_penalty=1.0):
            first = first or time.perf_counter() - start
            ids.append(int(token))
            if len(ids) == asked["tokens"]:
                break
        seconds = time.perf_counter() - start
        memory = peak_memory() - before
        print(json.dumps({"ids": ids, "first_s": first, "seconds": seconds, "memory": memory}), flush=True)


if __name__ == "__main__":
    main()
