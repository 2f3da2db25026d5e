"""Tokens per second of the engine at 1, 4 and 16 requests at a time, plain and with a drafter, arms in turn.

    python bench/throughput.py [--model smollm2-135m] [--method suffix] [--prompts FILE.jsonl] [--requests 1 4 16]

A line of FILE is {"turns": [text, …]}; without one, the prompts of `prompts.py`. Greedy, EOS ignored, total tokens over
total time (prompts included).
"""

import script  # noqa: F401 - Ctrl-C is one line from here on

# isort: split
import argparse
import json
import time
from pathlib import Path

from prompts import PROMPTS
from provenance import provenance, warn_if_busy

from paceline.core.params import SamplingParams
from paceline.engine.engine import RequestOptions
from paceline.engine.llm import LLM
from paceline.models.load import load_model
from paceline.models.progress import terminal_progress


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--method", default="suffix")
    parser.add_argument("--draft-model")
    parser.add_argument("--num-draft-tokens", "-k", type=int, default=5)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    warn_if_busy()
    speculation = {"method": args.method, "num_speculative_tokens": args.num_draft_tokens}
    if args.draft_model:
        speculation["model"] = args.draft_model
    model = load_model(args.model, dtype=args.dtype, progress=terminal_progress())

    def fresh(seats: int) -> LLM:
        """A drafter that has seen nothing: answers of an earlier row, replayed, would look like speed."""
        return LLM(model, speculation, max_model_len=2048, max_num_seqs=seats, enable_prefix_caching=False)

    texts = (
        [json.loads(line)["turns"][0] for line in args.prompts.read_text().splitlines()] if args.prompts else PROMPTS
    )
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    arms = {"plain": RequestOptions(speculative=False), args.method: RequestOptions()}
    fresh(1).generate(texts[:1], SamplingParams(temperature=0, max_tokens=8), arms["plain"])  # warm-up
    rows, identical = [], True
    for count in args.requests:
        llm = fresh(count)
        chosen = [llm.chat_ids([{"role": "user", "content": texts[i % len(texts)]}]) for i in range(max(count, 4))]
        outputs = {}
        for name, options in arms.items():
            tokens, start = 0, time.perf_counter()
            outputs[name] = []
            for first in range(0, len(chosen), count):
                for output in llm.generate(chosen[first : first + count], params, options):
                    tokens += output.usage.completion_tokens
                    outputs[name].append(output)
            seconds = time.perf_counter() - start
            steps = sum(output.metrics.speculation.num_steps for output in outputs[name])
            rows.append({"requests": count, "arm": name, "tokens_per_second": tokens / seconds})
            print(
                f"{count:3} at a time, {name:12} {tokens / seconds:8.1f} tokens/s, {tokens / steps:.2f} tokens a pass",
                flush=True,
            )
        ids = [[output.outputs[0].token_ids for output in outputs[name]] for name in arms]
        identical &= ids[0] == ids[1]
        print(f"    outputs {'identical' if ids[0] == ids[1] else 'DIFFERENT'}")
    print(json.dumps({"provenance": provenance(), "model": args.model, "exact": model.exact, "rows": rows}))
    return 0 if identical else 1


if __name__ == "__main__":
    raise SystemExit(main())
