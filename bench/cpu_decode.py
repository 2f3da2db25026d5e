"""Decoding on the CPU, side by side with llama.cpp: the same GGUF file, the same prompt ids, arms in turn.

    python bench/cpu_decode.py plain rows parts --model qwen2.5-coder-1.5b --llama-python llama/bin/python
    python bench/cpu_decode.py best --model qwen2.5-coder-1.5b --draft-model qwen2.5-coder-0.5b --prompts FILE --raw

plain   ms a token at batch 1 behind a 128-token prompt, against llama.cpp with flash attention on and off
rows    what a pass of 16 and 32 rows costs beside one of 1 row, at context 128 and 2,048
parts   a 1-row pass: its linear layers against a plain read of their bytes, and the rest
drafts  a step of an EAGLE-3 head (random weights, 8k draft vocabulary) as it is by default and with matrices in bf16,
        and of --draft-model, beside one of the target
best    `auto` against llama.cpp's best, plain or with its prompt lookup, on the prompts of a file
memory  the most resident memory beyond what imports took, over the size of the weight file

A run on a busy machine says so, in its result too: its figures are void.
"""

import script  # noqa: F401 - Ctrl-C is one line from here on

# isort: split
import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cpu_passes import filled as filled_cache
from cpu_passes import in_turn, one_pass, parts_of_a_pass, pass_times
from llama_process import ARMS, LlamaProcess
from provenance import provenance, warn_if_busy

from paceline.bench.method import MethodArm
from paceline.core.params import SamplingParams
from paceline.drafters.config import SpeculativeConfig
from paceline.errors import PacelineError
from paceline.models.load import LoadedModel, load_model, resolve
from paceline.models.progress import terminal_progress
from paceline.models.sources import GGUFSource

PARTS = ("plain", "rows", "parts", "drafts", "best", "memory")
PLAIN_ARMS = ARMS[:2]
HEAD_DTYPES = ("auto", "bf16")
CONTEXT = 2560  # positions that every engine is given room for


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def gguf_of(model: LoadedModel) -> Path:
    source = resolve(model.name)
    if not isinstance(source, GGUFSource):
        raise PacelineError(f"llama.cpp reads GGUF files, and {model.name} is none")
    return source.path


def prompt_of(model: LoadedModel, tokens: int) -> list[int]:
    """English text, cut to so many tokens."""
    assert model.tokenizer is not None
    return model.tokenizer.encode(Path(__file__).with_name("tuning_prompts.txt").read_text() * 4, True)[:tokens]


def plain(args: argparse.Namespace, model: LoadedModel) -> dict[str, Any]:
    prompt, ours = prompt_of(model, 128), MethodArm("ours", model, SpeculativeConfig(method="none"), 1)
    theirs = LlamaProcess(args.llama_python, gguf_of(model), args.threads, CONTEXT, PLAIN_ARMS)
    times: dict[str, list[float]] = {name: [] for name in ("ours", *PLAIN_ARMS)}
    for number in range(args.repeats + 1):
        ours.forget()
        (answer,) = ours.answer([prompt], [greedy(args.tokens)]).answers
        taken = {"ours": 1e3 * (answer.decode_s or 0) / answer.decode_tokens}
        taken |= {arm: theirs.answer(arm, prompt, args.tokens).ms_per_token for arm in PLAIN_ARMS}
        if number:  # the first round warms up
            for name, ms in taken.items():
                times[name].append(ms)
    medians = {name: statistics.median(each) for name, each in times.items()}
    best = min(PLAIN_ARMS, key=medians.__getitem__)
    theirs.close()
    print(
        f"plain, 128-token prompt, {args.tokens} tokens: {_shown(medians)} ms a token; llama.cpp flags: {theirs.facts}"
    )
    print(f"  ratio to llama.cpp's best ({best}): {medians[best] / medians['ours']:.3f}")
    return {"ms_per_token": medians, "ratio": medians[best] / medians["ours"], "llama": theirs.facts, "all": times}


def rows(args: argparse.Namespace, model: LoadedModel) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for context in (128, 2048):
        times = pass_times(model.decoder, context, (1, 2, 4, 8, 16, 32), args.repeats)
        found[str(context)] = times
        ratios = {rows: ms / times["1"] for rows, ms in times.items()}
        print(f"passes at context {context}: {_shown(times)} ms; beside one row: {_shown(ratios)}")
    return found


def parts(args: argparse.Namespace, model: LoadedModel) -> dict[str, Any]:
    found = parts_of_a_pass(model.decoder, 128, args.repeats)
    rest = found["pass"] - found["linears"]
    print(
        f"a 1-row pass: {found['pass']:.2f} ms; linear layers {found['linears']:.2f} ms, which read "
        f"{found['megabytes']:.0f} MB; "
        f"a plain read of these {found['read']:.2f} ms ({found['read'] / found['linears']:.0%} of its speed); "
        f"the rest {rest:.2f} ms ({rest / found['pass']:.0%})"
    )
    return found


def drafts(args: argparse.Namespace, model: LoadedModel) -> dict[str, Any]:
    from random_heads import random_eagle3

    cache = filled_cache(model.decoder, 128, 1)
    calls: dict[str, Callable[[], object]] = {"target": lambda: one_pass(model.decoder, cache, 1)}
    calls |= {f"EAGLE-3 step, {dtype}": random_eagle3(model.decoder, 8192, dtype) for dtype in HEAD_DTYPES}
    if args.draft_model:
        draft = load_model(args.draft_model, dtype=args.draft_dtype, progress=terminal_progress()).decoder
        if args.draft_vocab_size is not None:
            draft = draft.with_vocabulary(args.draft_vocab_size)
        draft_cache = filled_cache(draft, 128, 1)
        calls[args.draft_model] = lambda: one_pass(draft, draft_cache, 1)
    times = in_turn(calls, args.repeats)
    ratios = {name: ms / times["target"] for name, ms in times.items()}
    print(f"drafts: {_shown(times)} ms; beside the target: {_shown(ratios)}")
    return {"ms": times, "ratios": ratios}


def best(args: argparse.Namespace, model: LoadedModel) -> dict[str, Any]:
    assert model.tokenizer is not None
    if args.prompts is None:
        raise PacelineError("`best` needs prompts", hint="--prompts FILE, JSON lines of {turns: [text, …]}")
    lines = [json.loads(line) for line in args.prompts.read_text().splitlines()]
    chosen = [line for line in lines if args.category in (None, line.get("category"))][: args.first]
    config: dict[str, Any] = {"method": "auto"}
    if args.draft_model:
        config |= {
            "model": args.draft_model,
            "draft_dtype": args.draft_dtype,
            "draft_vocab_size": args.draft_vocab_size,
        }
    ours = MethodArm("ours", model, SpeculativeConfig.from_dict(config), 1)
    theirs = LlamaProcess(args.llama_python, gguf_of(model), args.threads, CONTEXT)
    seconds = dict.fromkeys(("ours", *ARMS), 0.0)
    ratios = []
    for number, line in enumerate(chosen):
        text = line["turns"][0]
        messages = [{"role": "user", "content": text}]
        prompt = model.tokenizer.encode(text, True) if args.raw else model.tokenizer.apply_chat_template(messages)
        ours.forget()
        if not number:
            ours.warm_up([prompt], [greedy(8)])
            for arm in ARMS:
                theirs.answer(arm, prompt, 8)
        (answer,) = ours.answer([prompt], [greedy(args.tokens)]).answers
        taken = {"ours": answer.seconds}
        taken |= {arm: theirs.answer(arm, prompt, args.tokens).seconds for arm in ARMS}
        for name, each in taken.items():
            seconds[name] += each
        ratios.append(min(taken[arm] for arm in ARMS) / taken["ours"])
        print(f"  {number + 1}/{len(chosen)} {_shown(taken)} s", flush=True)
    theirs.close()
    name = min(ARMS, key=seconds.__getitem__)
    whole, middle = seconds[name] / seconds["ours"], statistics.median(ratios)
    print(f"best, {len(chosen)} prompts x {args.tokens} tokens: {_shown(seconds)} s in all")
    print(
        f"  ratio to llama.cpp's best arm ({name}): {whole:.3f}; "
        f"median over prompts, each against its best: {middle:.3f}"
    )
    return {"seconds": seconds, "ratio": whole, "median_ratio": middle, "choices": ours.choices}


def memory(args: argparse.Namespace, model: LoadedModel) -> dict[str, Any]:
    worker = Path(__file__).with_name("peak_memory.py")
    done = subprocess.run(
        [sys.executable, str(worker), args.model, args.dtype, str(args.threads)], capture_output=True, text=True
    )
    if done.returncode:
        raise PacelineError(f"peak_memory.py: {done.stderr.strip().splitlines()[-1]}")
    found: dict[str, Any] = json.loads(done.stdout)
    file = gguf_of(model).stat().st_size
    theirs = LlamaProcess(args.llama_python, gguf_of(model), args.threads, CONTEXT, PLAIN_ARMS[:1])
    peer = theirs.answer(PLAIN_ARMS[0], prompt_of(model, 128), 16).memory
    theirs.close()
    found |= {"file": file, "ratio": (found["peak"] - found["before"]) / (file + found["kv"]), "llama": peer / file}
    print(
        f"memory: {(found['peak'] - found['before']) / 1e6:.0f} MB beyond imports and tokenizer; "
        f"file {file / 1e6:.0f} MB, KV {found['kv'] / 1e6:.0f} MB: {found['ratio']:.2f} "
        f"(llama.cpp {found['llama']:.2f} of the file)"
    )
    return found


def _shown(numbers: dict[str, float]) -> str:
    return ", ".join(f"{name} {number:.2f}" for name, number in numbers.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=PARTS, metavar="PART")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--draft-model")
    parser.add_argument("--draft-dtype", default="auto")
    parser.add_argument("--draft-vocab-size", type=int, metavar="N", help="the draft model draws from the N lowest ids")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--category", help="of the prompts' lines; default: all")
    parser.add_argument("--raw", action="store_true", help="complete the prompts without the chat template")
    parser.add_argument("--first", type=int, default=20, help="how many prompts (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--llama-python", default=sys.executable, help="an interpreter that has llama-cpp-python")
    parser.add_argument("--log", type=Path, help="append the result here as one JSON line")
    args = parser.parse_args()

    warn_if_busy()
    torch.set_num_threads(args.threads)
    facts = provenance()
    model = load_model(args.model, dtype=args.dtype, progress=terminal_progress())
    print(f"{model.name}: {model.treatment}; exact: {model.exact}; {args.threads} threads")
    known = {"plain": plain, "rows": rows, "parts": parts, "drafts": drafts, "best": best, "memory": memory}
    result: dict[str, Any] = {
        "provenance": facts,
        "model": model.name,
        "weights": model.treatment,
        "exact": model.exact,
    }
    for name in args.what:
        result[name] = known[name](args, model)
        if args.log:
            with args.log.open("a") as file:
                print(
                    json.dumps({key: result[key] for key in ("provenance", "model", "weights", "exact", name)}),
                    file=file,
                )
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
