"""Does the cost table tell what speculation brings? Predicted against measured speed-up, for chains of K = 1 … 8.

    python bench/prediction.py [--model smollm2-135m] [--own-layers 10 | --draft-model NAME] [--prompts FILE]

Plain decoding and a draft model's chains of every K answer the same prompts in turn, greedy, EOS ignored, one request
at a time. Measured: tokens a second after each answer's first, to plain decoding's. Predicted: from the table that
`auto` has after it answered the prompts which ship with the package, and from how often each draft position was
accepted here. They must agree within 15 %. The last line is one JSON object.
"""

import script  # noqa: F401 - Ctrl-C is one line from here on

# isort: split
import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any, cast

from never_slower import PRACTICE, encode, first_turn
from own_layers import own_layers
from prompts import SHORT
from provenance import portable, provenance, warn_if_busy

from paceline.bench.answers import Answer
from paceline.bench.blocks import rotated
from paceline.bench.bootstrap import Paired, ratio
from paceline.bench.method import MethodArm
from paceline.bench.prompts import read_prompts
from paceline.core.params import SamplingParams
from paceline.drafters.config import SpeculativeConfig
from paceline.engine.costs import CostTable
from paceline.engine.policy import AutoPolicy
from paceline.engine.statistics import SpeculationStatistics
from paceline.models.load import LoadedModel, load_model
from paceline.models.progress import terminal_progress

WITHIN = 0.15
METHOD = "draft_model"
K = range(1, 9)
BUILD = Path(__file__).parent.parent / "build"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    drafts = parser.add_mutually_exclusive_group()
    drafts.add_argument("--draft-model")
    drafts.add_argument("--own-layers", type=int, default=10, metavar="N", help="the target's first N layers draft")
    parser.add_argument("--k", type=int, nargs="+", default=list(K))
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--first", type=int, default=8, help="how many prompts (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--log", type=Path, help="append the result here as one JSON line")
    args = parser.parse_args()

    warn_if_busy()
    facts = provenance()
    model = load_model(args.model, dtype=args.dtype, progress=terminal_progress())
    name = f"{Path(args.model).name}-first-{args.own_layers}"
    draft = args.draft_model or str(own_layers(model, range(args.own_layers), BUILD / name))
    given = [first_turn(each) for each in read_prompts(str(args.prompts)).conversations] if args.prompts else SHORT
    prompts = [encode(model, text) for text in given[: args.first]]

    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    table = learnt_costs(model, draft, params)
    plain = MethodArm("plain", model, SpeculativeConfig(), 1)
    chains = {k: MethodArm(f"K {k}", model, chain(draft, k), 1) for k in args.k}
    answers = answered([plain, *chains.values()], prompts, params)
    context = mean(len(prompt) for prompt in prompts) + args.tokens / 2
    rows = [row(k, table, answers[arm.label], answers[plain.label], context) for k, arm in chains.items()]
    holds = show(rows)
    result = {
        "provenance": facts,
        "model": args.model,
        "precision": model.precision,
        "draft": portable(draft),
        "prompts": len(prompts),
        "tokens": args.tokens,
        "rows": rows,
        "holds": holds,
    }
    print(json.dumps(result))
    if args.log:
        with args.log.open("a") as file:
            print(json.dumps(result), file=file)
    return 0 if holds else 1


def chain(draft: str, k: int) -> SpeculativeConfig:
    """Always k tokens: it does not end where it is in doubt, nor spends time on telling."""
    return SpeculativeConfig(METHOD, k, model=draft, draft_confidence_threshold=0.0)


def learnt_costs(model: LoadedModel, draft: str, params: SamplingParams) -> CostTable:
    """As `auto` has them, on other prompts."""
    arm = MethodArm("auto", model, replace(chain(draft, max(K)), method="auto"), 1)
    for each in read_prompts(None, PRACTICE).conversations:
        arm.warm_up([encode(model, first_turn(each))], [params])
    return cast(AutoPolicy, arm.llm.engine.policy).costs


def answered(
    arms: Sequence[MethodArm], prompts: Sequence[Sequence[int]], params: SamplingParams
) -> dict[str, list[Answer]]:
    answers: dict[str, list[Answer]] = {arm.label: [] for arm in arms}
    for arm in arms:
        arm.warm_up(prompts[:1], [params])
    for turn, prompt in enumerate(prompts):
        for arm in rotated(arms, turn):
            answers[arm.label] += arm.answer_privately([prompt], [params]).answers
            arm.forget()
        print(f"{turn + 1}/{len(prompts)}", file=sys.stderr, flush=True)
    return answers


def row(k: int, table: CostTable, own: Sequence[Answer], plain: Sequence[Answer], context: float) -> dict[str, Any]:
    accepted = by_position(own, k)
    measured = ratio([paired(a, b) for a, b in zip(own, plain, strict=True)])
    assert measured is not None
    predicted = table.speedup(METHOD, accepted, context)
    return {
        "k": k,
        "accepted_by_position": accepted,
        "measured": measured.point,
        "low": measured.low,
        "high": measured.high,
        "predicted": predicted,
        "off": predicted / measured.point - 1,
        "identical": [a.token_ids for a in own] == [b.token_ids for b in plain],
    }


def paired(own: Answer, plain: Answer) -> Paired:
    assert own.decode_s is not None and plain.decode_s is not None
    return Paired(own.decode_tokens, own.decode_s, plain.decode_tokens, plain.decode_s)


def by_position(answers: Sequence[Answer], k: int) -> list[float]:
    """For each draft position: how often its token was accepted where all before it were."""
    total = SpeculationStatistics()
    reached = [0] * k
    for answer in answers:
        assert answer.speculation is not None
        total.merge(answer.speculation)
        for i, count in enumerate(answer.drafts_of_depth[:k]):
            reached[i] += count
    right = [sum(total.acceptance_histogram[i + 1 :]) for i in range(k)]  # passes that accepted more than i tokens
    tried = [reached[0], *(min(r, n) for r, n in zip(right, reached[1:], strict=False))]
    return [r / t if t else 0.0 for r, t in zip(right, tried, strict=True)]


def show(rows: Sequence[dict[str, Any]]) -> bool:
    print(f"{'K':>2} {'measured':>9} {'95 %':>16} {'predicted':>10} {'off':>7}  outputs")
    for each in rows:
        interval = f"{each['low']:.3f} to {each['high']:.3f}" if each["low"] is not None else "-"
        outputs = "identical" if each["identical"] else "DIFFERENT"
        figures = f"{each['measured']:9.3f} {interval:>16} {each['predicted']:10.3f} {each['off']:+7.1%}"
        print(f"{each['k']:2} {figures}  {outputs}")
    holds = all(abs(each["off"]) <= WITHIN and each["identical"] for each in rows)
    print(f"predicted within {WITHIN:.0%}: {'holds' if holds else 'DOES NOT HOLD'}")
    return holds


if __name__ == "__main__":
    sys.exit(main())
