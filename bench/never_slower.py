"""Never slower: `auto` against plain decoding, and against each fixed method, on the same prompts in turn.

    python bench/never_slower.py --prompts FILE … [--model smollm2-135m] [--own-layers 10 | --draft-model NAME]
        [--concurrency 1 4 8 16] [--fixed ngram suffix …]

Files are as `paceline bench` reads them; of each category the first --per-category prompts are taken, and as many of
random words, which nothing can draft for. Greedy, EOS ignored. A block is requests of one category, answered by every
arm in turn: --waves times as many as run at once, so that a seat that falls free is taken (singly, one). Prompts come
round again until a cell (a category at a concurrency) has --blocks, and from then on until its interval is as narrow as
--width asks, or it has --most-blocks: how many it gets hangs on how wide the interval is, never on where it lies. No
drafter learns from another request's answer. `auto` comes with the profile and the acceptance that it gathered on the
prompts which ship with the package.

It must hold: over all blocks the lower bound of the 95 % interval (bootstrap over blocks) of `auto`'s tokens per second
to plain decoding's is at least 0.97; in every cell the ratio is at least 0.97 and its lower bound 0.93; and `auto` has
0.9 of the gain of the best fixed method in each category. Blocks are appended to a log as they are done; a run takes up
where the last one of the same code and settings stopped. The last line is one JSON object.
"""

from script import Remaining, resumable

# isort: split
import argparse
import json
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from own_layers import own_layers
from provenance import portable, provenance, warn_if_busy
from resumed import fingerprint, read, sources

from paceline.bench.blocks import rotated
from paceline.bench.bootstrap import Paired, Ratio, ratio
from paceline.bench.method import MethodArm
from paceline.bench.prompts import Conversation, read_prompts
from paceline.core.params import SamplingParams
from paceline.drafters.config import SpeculativeConfig
from paceline.models.load import LoadedModel, load_model
from paceline.models.progress import terminal_progress

ROOT = Path(__file__).parent.parent
POOLED_LOW, CELL_POINT, CELL_LOW, OF_BEST_GAIN = 0.97, 0.97, 0.93, 0.9
PLAIN, AUTO = "none", "auto"
RANDOM = "random words"
PRACTICE = 2  # shipped prompts of each category


Cell: TypeAlias = tuple[int, str]
"""A number of requests that run together, and their category."""


@dataclass(frozen=True, slots=True)
class Block:
    """Requests of a cell: one sample of it."""

    concurrency: int
    category: str
    number: int
    prompts: tuple[tuple[int, ...], ...]

    @property
    def key(self) -> tuple[int, str, int]:
        return (self.concurrency, self.category, self.number)


@dataclass(frozen=True, slots=True)
class Sample:
    """What every arm took for a block: tokens and seconds; `differing`: arms with another answer than plain's."""

    concurrency: int
    category: str
    number: int
    tokens: Mapping[str, int]
    seconds: Mapping[str, float]
    differing: Sequence[str]

    @property
    def key(self) -> tuple[int, str, int]:
        return (self.concurrency, self.category, self.number)

    def paired(self, arm: str) -> Paired:
        return Paired(self.tokens[arm], self.seconds[arm], self.tokens[PLAIN], self.seconds[PLAIN])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    drafts = parser.add_mutually_exclusive_group()
    drafts.add_argument("--draft-model")
    drafts.add_argument("--own-layers", type=int, metavar="N", help="draft with the target's first N layers")
    parser.add_argument("--fixed", nargs="*", default=[], metavar="METHOD", help="methods with their own defaults")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--per-category", type=int, default=12)
    parser.add_argument("--blocks", type=int, default=6, help="of a cell, at least (default: %(default)s)")
    parser.add_argument("--most-blocks", type=int, default=36, help="of a cell, at most (default: %(default)s)")
    parser.add_argument("--width", type=float, default=0.03,
        help="from the point to the lower bound, wanted of a cell (default: %(default)s)")  # fmt: skip
    parser.add_argument("--waves", type=int, default=1, help="requests for each seat (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--log", type=Path, help="default: bench/results/never_slower-MODEL[-DRAFT].jsonl")
    args = parser.parse_args()

    warn_if_busy()
    model = load_model(args.model, dtype=args.dtype, progress=terminal_progress())
    draft, name = args.draft_model, Path(args.model).name
    if args.own_layers is not None:
        draft = str(own_layers(model, range(args.own_layers), ROOT / "build" / f"{name}-first-{args.own_layers}"))
    configs = {method: config(method, draft) for method in (PLAIN, AUTO, *args.fixed)}
    texts = {category: texts for file in args.prompts for category, texts in categories(file, args.per_category)}
    texts[RANDOM] = random_words(args.per_category)
    prompts = {category: [encode(model, text) for text in texts] for category, texts in texts.items()}
    numbers = {  # of blocks; each prompt is in one at least
        (count, category): max(args.blocks, -(-len(own) // count))
        for count in args.concurrency
        for category, own in prompts.items()
    }

    log = args.log or ROOT / "bench" / "results" / f"never_slower-{name}{f'-{Path(draft).name}' if draft else ''}.jsonl"
    settings = {
        "model": args.model,
        "precision": model.precision,
        "draft": draft and portable(draft),
        "arms": list(configs),
        "tokens": args.tokens,
        "waves": args.waves,
        "prompts": fingerprint(args.prompts),
    }
    code = f"{fingerprint(code_files())} {json.dumps(settings, sort_keys=True)}"
    samples = {sample.key: sample for sample in (Sample(**line) for line in read(log, code))}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file, resumable():
        print(json.dumps({"provenance": provenance(), "code": code}), file=file, flush=True)
        while True:
            blocks = [block for cell, count in numbers.items() for block in blocks_of(cell, prompts, count, args.waves)]
            remaining = Remaining(sum(block.key not in samples for block in blocks))
            for sample in measure(model, configs, blocks, set(samples), args.tokens):
                samples[sample.key] = sample
                print(json.dumps(asdict(sample) | {"code": code}), file=file, flush=True)
                found = sample.paired(AUTO)
                speed = found.tokens / found.seconds / (found.plain_tokens / found.plain_seconds)
                print(f"{sample.key}: {speed:.3f}; {remaining.after_one_more()}", file=sys.stderr, flush=True)
            own = [samples[block.key] for block in blocks]  # the log may have other cells, too
            wide = [cell for cell in too_wide(own, args.width) if numbers[cell] < args.most_blocks]
            if not wide:
                break
            print(f"{len(wide)} cells are not sure enough yet", file=sys.stderr, flush=True)
            for cell in wide:
                numbers[cell] = min(args.most_blocks, numbers[cell] + -(-numbers[cell] // 2))

    result = {"provenance": provenance(), **settings, **verdict([samples[b.key] for b in blocks], list(configs))}
    print(json.dumps(result))
    return 0 if result["holds"] else 1


def config(method: str, draft: str | None) -> SpeculativeConfig:
    takes_it = method in (AUTO, "draft_model")
    return SpeculativeConfig.from_dict({"method": method, **({"model": draft} if draft and takes_it else {})})


def categories(file: Path, count: int) -> Iterator[tuple[str, list[str]]]:
    conversations = read_prompts(str(file), count).conversations
    for category in dict.fromkeys(each.category for each in conversations):
        yield category, [first_turn(each) for each in conversations if each.category == category]


def first_turn(conversation: Conversation) -> str:
    return conversation.turns[0]


def random_words(count: int) -> list[str]:
    """Prompts of words that no text has."""
    draw = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    return [
        " ".join("".join(draw.choices(letters, k=draw.randint(2, 9))) for _ in range(draw.randint(30, 90)))
        for _ in range(count)
    ]


def encode(model: LoadedModel, text: str) -> tuple[int, ...]:
    assert model.tokenizer is not None
    return tuple(model.tokenizer.apply_chat_template([{"role": "user", "content": text}]))


def blocks_of(cell: Cell, prompts: Mapping[str, Sequence[tuple[int, ...]]], count: int, waves: int) -> Iterator[Block]:
    """The first so many blocks of a cell, whose prompts come round again and again."""
    concurrency, category = cell
    own, size = prompts[category], 1 if concurrency == 1 else waves * concurrency
    for number in range(count):
        first = number * size
        yield Block(concurrency, category, number, tuple(own[(first + i) % len(own)] for i in range(size)))


def too_wide(samples: Iterable[Sample], width: float) -> list[Cell]:
    """Cells whose lower bound is further from the point than that."""
    own: dict[Cell, list[Paired]] = {}
    for sample in samples:
        own.setdefault((sample.concurrency, sample.category), []).append(sample.paired(AUTO))
    found = {cell: ratio(pairs) for cell, pairs in own.items()}
    return [cell for cell, each in found.items() if each is None or each.low is None or each.point - each.low > width]


def measure(
    model: LoadedModel,
    configs: Mapping[str, SpeculativeConfig],
    blocks: Sequence[Block],
    done: set[tuple[int, str, int]],
    tokens: int,
) -> Iterator[Sample]:
    """Every block that is not done. Categories take turns, so that a slow minute strikes no single one."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    shipped = read_prompts(None, PRACTICE).conversations
    for concurrency in dict.fromkeys(block.concurrency for block in blocks):
        todo = [block for block in blocks if block.concurrency == concurrency and block.key not in done]
        if not todo:
            continue
        arms = [MethodArm(label, model, own, concurrency) for label, own in configs.items()]
        practice = [encode(model, first_turn(each)) for each in shipped]
        for arm in arms:
            for first in range(0, len(practice), concurrency):
                group = practice[first : first + concurrency]
                arm.warm_up(group, [params] * len(group))
        for turn, block in enumerate(sorted(todo, key=lambda block: block.number)):
            measured = {}
            for arm in rotated(arms, turn):
                measured[arm.label] = arm.answer_privately(block.prompts, [params] * len(block.prompts))
                arm.forget()
            plain = [answer.token_ids for answer in measured[PLAIN].answers]
            yield Sample(
                *block.key,
                tokens={label: own.num_tokens for label, own in measured.items()},
                seconds={label: own.seconds for label, own in measured.items()},
                differing=[label for label, own in measured.items() if [a.token_ids for a in own.answers] != plain],
            )


def verdict(samples: Sequence[Sample], arms: Sequence[str]) -> dict[str, Any]:
    """The figures, and whether it holds; printed too."""
    pooled = ratio([sample.paired(AUTO) for sample in samples])
    rows, faults = [], []
    for concurrency, category in dict.fromkeys((s.concurrency, s.category) for s in samples):
        own = [s for s in samples if (s.concurrency, s.category) == (concurrency, category)]
        found = {arm: ratio([sample.paired(arm) for sample in own]) for arm in arms if arm != PLAIN}
        rows.append({"concurrency": concurrency, "category": category, **{a: asdict(r) for a, r in found.items() if r}})
        faults += judged(f"{category} at {concurrency}", found)
    if pooled is None or pooled.low is None or pooled.low < POOLED_LOW:
        faults.append(f"over all: the lower bound is below {POOLED_LOW}")
    differing = sum(len(sample.differing) for sample in samples)
    if differing:
        faults.append(f"{differing} answers to blocks are not plain decoding's")
    for row in rows:
        figures = ", ".join(f"{arm} {words(row[arm])}" for arm in arms if arm in row)
        print(f"{row['category']:18} at {row['concurrency']:2}: {figures}")
    print(f"over all {len(samples)} blocks: auto {words(asdict(pooled)) if pooled else '-'}")
    print("\n".join(faults) or "never slower: holds")
    return {"rows": rows, "pooled": asdict(pooled) if pooled else None, "faults": faults, "holds": not faults}


def judged(cell: str, found: Mapping[str, Ratio | None]) -> Iterator[str]:
    """What does not hold in a cell."""
    own = found[AUTO]
    if own is None or own.low is None:
        yield f"{cell}: too few blocks"
        return
    if own.point < CELL_POINT or own.low < CELL_LOW:
        yield f"{cell}: auto {own.point:.3f}, lower bound {own.low:.3f}"
    others = {arm: each.point for arm, each in found.items() if arm != AUTO and each is not None}
    if others:
        best = max(others, key=lambda arm: others[arm])
        if own.point - 1 < OF_BEST_GAIN * (others[best] - 1):
            yield f"{cell}: auto gains {own.point - 1:+.3f}, {best} {others[best] - 1:+.3f}"


def words(found: Mapping[str, Any]) -> str:
    low, high = found["low"], found["high"]
    return f"{found['point']:.3f}" + ("" if low is None else f" ({low:.3f} to {high:.3f})")


def code_files() -> list[Path]:
    """All that a sample depends on."""
    return [*sources("core", "ops", "models", "drafters", "engine", "bench"), Path(__file__)]


if __name__ == "__main__":
    sys.exit(main())
