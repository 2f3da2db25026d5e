"""Speculative against plain decoding on real prompts: total tokens over total time, arms in turn, prompt by prompt.

    python bench/decode_speed.py PROMPTS.jsonl --raw --model qwen2.5-coder-1.5b --draft-model qwen2.5-coder-0.5b

Each arm's first step is left out of tokens and time: the prompt, and for a draft model its catching up with it.
A line of PROMPTS.jsonl is {"turns": [text, …]}; the first turn is the prompt (`--raw`: completed as it is).
"""

import script  # noqa: F401 - Ctrl-C is one line from here on

# isort: split
import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from provenance import provenance, warn_if_busy

from paceline.core.params import SamplingParams
from paceline.decode import decode
from paceline.drafters.base import Drafter, create_drafter
from paceline.drafters.config import SpeculativeConfig
from paceline.models.load import LoadedModel, load_model
from paceline.models.progress import terminal_progress


@dataclass
class Arm:
    """What one way of decoding took, summed over the prompts; the first token's time (prompt included) is left out."""

    name: str
    tokens: int = 0
    seconds: float = 0.0
    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    outputs: list[list[int]] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def run(target: LoadedModel, drafter: Drafter, k: int, prompt: list[int], tokens: int, arm: Arm) -> None:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    steps = decode(target.decoder, prompt, params, drafter, k)
    out = list(next(steps).token_ids)
    first = len(out)
    start = time.perf_counter()
    for step in steps:
        out.extend(step.token_ids)
        arm.passes += 1
        arm.drafted += step.num_draft_tokens
        arm.accepted += step.num_accepted_tokens
    arm.seconds += time.perf_counter() - start
    arm.tokens += len(out) - first
    arm.outputs.append(out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--method", default=None, help="default: draft_model with --draft-model, else ngram")
    parser.add_argument("--draft-model")
    parser.add_argument("--num-draft-tokens", "-k", type=int, default=5)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--first", type=int, default=20, help="how many prompts (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--raw", action="store_true", help="complete the prompts without the chat template")
    parser.add_argument("--log", type=Path, help="append the result here as one JSON line")
    args = parser.parse_args()

    warn_if_busy()
    facts = provenance()
    target = load_model(args.model, dtype=args.dtype, progress=terminal_progress())
    assert target.tokenizer is not None
    method = args.method or ("draft_model" if args.draft_model else "ngram")
    drafter = create_drafter(SpeculativeConfig(method=method, model=args.draft_model), target)
    plain_drafter = create_drafter(SpeculativeConfig(), target)
    rows = [json.loads(line) for line in args.prompts.read_text().splitlines()[: args.first]]
    plain, speculative = Arm("plain"), Arm(f"{method}, K {args.num_draft_tokens}")
    for number, row in enumerate(rows):
        text = row["turns"][0]
        messages = [{"role": "user", "content": text}]
        tokenizer = target.tokenizer
        prompt = tokenizer.encode(text, add_special=True) if args.raw else tokenizer.apply_chat_template(messages)
        if number == 0:  # warm-up, not counted
            run(target, plain_drafter, 0, prompt, 8, Arm("warm-up"))
            run(target, drafter, args.num_draft_tokens, prompt, 8, Arm("warm-up"))
        arms = ((plain, plain_drafter, 0), (speculative, drafter, args.num_draft_tokens))
        for arm, its_drafter, k in arms if number % 2 == 0 else arms[::-1]:
            run(target, its_drafter, k, prompt, args.tokens, arm)
        print(
            f"{number + 1}/{len(rows)}: plain {plain.tokens_per_second:.2f} tokens/s, "
            f"{speculative.name} {speculative.tokens_per_second:.2f} tokens/s, "
            f"ratio {speculative.tokens_per_second / plain.tokens_per_second:.3f}",
            flush=True,
        )
    same = plain.outputs == speculative.outputs
    ratio = speculative.tokens_per_second / plain.tokens_per_second
    print(
        f"\n{args.model} {args.dtype} (exact: {target.exact}), "
        f"{len(rows)} prompts x {args.tokens} tokens, first steps left out\n"
        f"plain        {plain.tokens_per_second:7.2f} tokens/s, {1e3 * plain.seconds / plain.passes:7.1f} ms a pass\n"
        f"speculative  {speculative.tokens_per_second:7.2f} tokens/s, "
        f"{1e3 * speculative.seconds / speculative.passes:7.1f} ms a round, "
        f"{speculative.tokens / speculative.passes:.2f} tokens a pass, "
        f"{speculative.accepted} of {speculative.drafted} drafts accepted\n"
        f"ratio {ratio:.3f}; outputs {'identical' if same else 'DIFFERENT'}"
    )
    result = {"provenance": facts, "exact": target.exact, "ratio": ratio, "identical": same}
    for arm in (plain, speculative):
        result[arm.name] = {key: value for key, value in asdict(arm).items() if key != "outputs"}
    print(json.dumps(result))
    if args.log:
        with args.log.open("a") as file:
            print(json.dumps(result), file=file)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
