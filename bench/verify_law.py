"""What `decode` samples has exactly the target's law: chi-square of the first three tokens against its enumeration.

Every rule with the drafts it takes, plain and filtered, 10⁵ draws each, `coupled` over consecutive seeds; a real
decoder of one layer; and controls, each with a planted fault, which must fail. The cases are those of
`tests/law_cases.py`, without the test lane's short cuts. Counts are appended to a log as they are done; a run takes up
where the last one stopped, and drops what other code has counted.

    python bench/verify_law.py
    python bench/verify_law.py --draws 1000000 --jobs 16 --log million.jsonl
"""

from script import Remaining, resumable

# isort: split
import argparse
import json
import os
import signal
import sys
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TextIO

import torch
from provenance import provenance
from resumed import fingerprint, read, sources

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from law import CAUGHT, Case, Law, Tally, faults, p_value, tally  # noqa: E402
from law_cases import (  # noqa: E402
    CONTROLS,
    FILTERED_CASES,
    LONG_CASES,
    PLAIN_CASES,
    TINY_CASE,
    TINY_CONTROL,
    WIDE_CASE,
    WIDE_CONTROL,
)

AT_ONCE = 5000  # draws in one line of the log
CASES = {case.name: case for case in (*PLAIN_CASES, *FILTERED_CASES, *LONG_CASES, TINY_CASE, WIDE_CASE)}
PLANTED = {case.name: case for case in (*CONTROLS, TINY_CONTROL, WIDE_CONTROL)}
WIDE_DRAWS = 300  # a draw among 152k tokens takes a hundred times as long, and one impossible token tells
FALSE_ALARM = 1e-4 / len(CASES)  # of all cases together once in 10⁴, for fresh seeds


@dataclass(frozen=True, slots=True)
class Part:
    """Draws of a case that are counted together."""

    name: str
    first: int
    draws: int

    @property
    def case(self) -> Case:
        return (CASES | PLANTED)[self.name]


@dataclass
class Count:
    """One case in the making."""

    case: Case
    wanted: int
    tally: Tally = field(default_factory=Tally)
    done: set[int] = field(default_factory=set)  # first draw of each part counted

    @cached_property
    def law(self) -> Law:
        return self.case.law

    def parts(self) -> list[Part]:
        return [
            Part(self.case.name, first, min(AT_ONCE, self.wanted - first)) for first in range(0, self.wanted, AT_ONCE)
        ]

    def missing(self) -> list[Part]:
        return [part for part in self.parts() if part.first not in self.done]

    def add(self, line: dict[str, Any]) -> None:
        counts = Counter({tuple(map(int, tokens.split())): count for tokens, count in line["counts"].items()})
        self.tally.add(Tally(counts, line["with_rejection"], line["with_acceptance"]))
        self.done.add(line["first"])

    def verdict(self) -> tuple[bool, str]:
        """Whether it came out as it must, and in words."""
        drawn, p = self.tally, p_value(self.tally.counts, self.law)
        words = (
            f"{self.case.name}: {drawn.draws} draws, {drawn.with_rejection / drawn.draws:.0%} with a rejection, "
            f"{drawn.with_acceptance / drawn.draws:.0%} with an accepted draft, p = {p:.2g}"
        )
        if self.case.name in PLANTED:
            return p < CAUGHT, f"{words} {'(a planted fault: caught)' if p < CAUGHT else 'A PLANTED FAULT NOT CAUGHT'}"
        found = faults(drawn, self.law, FALSE_ALARM)
        return not found, f"{words}{' FAILED: ' if found else ''}{'; '.join(found)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=100_000, help="of each case")
    parser.add_argument("--control-draws", type=int, default=20_000)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: one a core)")
    parser.add_argument("--log", type=Path, default=Path(__file__).parent / "results" / "verify_law.jsonl")
    args = parser.parse_args()

    wanted = dict.fromkeys(CASES, args.draws) | dict.fromkeys(PLANTED, args.control_draws)
    wanted |= dict.fromkeys((WIDE_CASE.name, WIDE_CONTROL.name), min(WIDE_DRAWS, args.draws))
    counts = {name: Count(case, wanted[name]) for name, case in (CASES | PLANTED).items()}
    expected = {part for count in counts.values() for part in count.parts()}
    code = fingerprint(code_files())
    for line in read(args.log, code):
        if Part(line["case"], line["first"], line["draws"]) in expected:
            counts[line["case"]].add(line)
    parts = [part for count in counts.values() for part in count.missing()]
    print(f"{len(counts)} cases, {sum(wanted.values())} draws; {len(parts)} parts to count", flush=True)
    args.log.parent.mkdir(parents=True, exist_ok=True)
    with args.log.open("a") as file:
        if parts:
            print(json.dumps({"provenance": provenance(), "code": code}), file=file, flush=True)
            with resumable():
                count_all(parts, counts, args.jobs, code, file)
    return summarise(counts)


def count_all(parts: list[Part], counts: dict[str, Count], jobs: int, code: str, file: TextIO) -> None:
    remaining = Remaining(len(parts))
    with get_context("spawn").Pool(jobs, initializer=start_worker) as pool:
        for number, line in enumerate(pool.imap_unordered(count_part, parts), start=1):
            count = counts[line["case"]]
            count.add(line)
            print(json.dumps(line | {"code": code}), file=file, flush=True)
            print(f"{number:4d}/{len(parts)} {count.verdict()[1]}; {remaining.after_one_more()}", flush=True)


def start_worker() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business: it ends the pool


def count_part(part: Part) -> dict[str, Any]:
    drawn = tally(part.case, part.case.seeds(part.first, part.draws))
    return {
        "case": part.name,
        "first": part.first,
        "draws": part.draws,
        "with_rejection": drawn.with_rejection,
        "with_acceptance": drawn.with_acceptance,
        "counts": {" ".join(map(str, tokens)): count for tokens, count in sorted(drawn.counts.items())},
    }


def code_files() -> list[Path]:
    """All that a draw depends on."""
    return [*sources("core"), ROOT / "src" / "paceline" / "decode.py", *sorted(ROOT.glob("tests/law*.py"))]


def summarise(counts: dict[str, Count]) -> int:
    verdicts = [count.verdict() for count in counts.values()]
    for _, words in verdicts:
        print(words)
    wrong = sum(not good for good, _ in verdicts)
    print(f"{len(CASES)} cases and {len(PLANTED)} planted faults: {wrong} came out wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
