"""The tables of `acceptance.py`: which arms there are, and what their cells come to."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from acceptance_cells import Answer, Cell

K = 4
REPEATS = 0.5  # of an answer's 4-grams, seen in it before: it repeats itself
COPIES = 0.5  # of an answer's 4-grams, seen in its prompt: it copies
MOST_PASSES = {"ngram on copying": 0.5, "lookahead on answers that repeat themselves": 0.75}
TITLES = {
    "copying": "copying, all prompts that ask for a copy or an edited copy, whatever the model then wrote",
    "copied": "of these, prompts that are really copied from (half of the answer's 4-grams stand in the prompt)",
    "not_copied": "of these, the others",
}
PLAIN = {"method": "none", "num_speculative_tokens": 0}
Config = dict[str, Any]
Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Arm:
    """A method with its options; it runs on each of the sets."""

    label: str
    config: Config
    sets: tuple[str, ...] = ("chat",)


def tables(num_layers: int, tuned: Config | None) -> dict[str, list[Arm]]:
    """The arms of each table."""
    exits = [(f"exit {e}", {"method": "early_exit", "early_exit_layer": e}) for e in range(1, num_layers)]
    skips: list[tuple[str, Config]] = [("default", {"method": "layer_skip"})]
    if tuned is not None:
        skips.append(("tuned", {"method": "layer_skip", **tuned}))
    free = ("lookahead", "token_recycling", "ngram", "suffix")
    return {
        "copying": [Arm(method, {"method": method}, ("copying",)) for method in ("ngram", "suffix")],
        "repeating": [Arm(method, {"method": method}, ("templates", "chat")) for method in free],
        "layer_skip": [Arm(label, {**config, "num_speculative_tokens": K}) for label, config in skips],
        "early_exit": [Arm(label, {**config, "num_speculative_tokens": K}) for label, config in exits],
        "always": [
            Arm(label, {**config, "num_speculative_tokens": K, "draft_confidence_threshold": 0.0})
            for label, config in exits
        ],
    }


def best_skips(log: Path) -> Config | None:
    """What the search wrote into its log: the set with the most tokens per second."""
    trials = [json.loads(line) for line in log.read_text().splitlines()[1:]] if log.exists() else []
    if not trials:
        return None
    best = max(trials, key=lambda trial: trial["tokens_per_second"])
    return {f"skip_{part}_layers": list(best["skips"][part]) for part in ("attention", "mlp")}


def key(name: str, config: Config) -> Key:
    """Of the cell of a config on the prompt set called `name`."""
    return name, json.dumps(config, sort_keys=True)


def row(label: str, answers: Sequence[Answer], plain: Sequence[Answer], cells: Sequence[Cell] = ()) -> dict[str, Any]:
    """An arm's answers against plain decoding's to the same prompts; `cells`, whose times tell the draft share."""
    passes, drafted = sum(a.passes for a in answers), sum(a.drafted for a in answers)
    seconds = sum(cell.seconds for cell in cells)
    return {
        "arm": label,
        "prompts": len(answers),
        "passes": passes,
        "of_plain": passes / sum(a.passes for a in plain),
        "acceptance_length": sum(a.tokens for a in answers) / passes,
        "acceptance_rate": sum(a.accepted for a in answers) / drafted if drafted else None,
        "drafted_a_pass": drafted / passes,
        "draft_share": sum(cell.draft_seconds for cell in cells) / seconds if seconds else None,
        "identical": all(a.digest == b.digest for a, b in zip(answers, plain, strict=True)),
    }


def table_rows(arms: Sequence[Arm], cells: Mapping[Key, Cell]) -> list[dict[str, Any]]:
    """One row an arm; cells that are still to come are left out."""
    rows = []
    for arm in arms:
        own = [cells[key(name, arm.config)] for name in arm.sets if key(name, arm.config) in cells]
        if len(own) == len(arm.sets):
            plain = [answer for name in arm.sets for answer in cells[key(name, PLAIN)].answers]
            answers = [answer for cell in own for answer in cell.answers]
            rows.append(row(arm.label, answers, plain, own) | {"config": arm.config})
    return rows


def parted_rows(
    arms: Sequence[Arm], cells: Mapping[Key, Cell], those: str, others: str, is_one: Callable[[Answer], bool]
) -> dict[str, list[dict[str, Any]]]:
    """The arms on the prompts whose plain answers are such as `is_one` tells, and on the others."""
    groups: dict[str, list[dict[str, Any]]] = {those: [], others: []}
    for arm in arms:
        if any(key(name, arm.config) not in cells for name in arm.sets):
            continue
        pairs = [
            pair
            for name in arm.sets
            for pair in zip(cells[key(name, arm.config)].answers, cells[key(name, PLAIN)].answers, strict=True)
        ]
        for group, wanted in ((those, True), (others, False)):
            chosen = [(own, plain) for own, plain in pairs if is_one(plain) == wanted]
            if chosen:
                own, plain = zip(*chosen, strict=True)
                groups[group].append(row(arm.label, own, plain) | {"config": arm.config})
    return groups


def repeats(answer: Answer) -> bool:
    return answer.repeats >= REPEATS


def copies(answer: Answer) -> bool:
    return answer.copied >= COPIES


def show(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    if not rows:
        return
    print(f"\n{title}: {rows[0]['prompts']} prompts")
    print(
        f"{'arm':16} {'passes':>7} {'of plain':>9} {'length':>7} {'rate':>6} {'drafted':>8} {'draft share':>12} outputs"
    )
    for line in rows:
        rate = "-" if line["acceptance_rate"] is None else f"{line['acceptance_rate']:.2f}"
        share = "-" if line["draft_share"] is None else f"{line['draft_share']:.1%}"
        print(
            f"{line['arm']:16} {line['passes']:7} {line['of_plain']:9.3f} {line['acceptance_length']:7.3f} {rate:>6} "
            f"{line['drafted_a_pass']:8.2f} {share:>12} {'identical' if line['identical'] else 'DIFFERENT'}"
        )


def report(chosen: Mapping[str, Sequence[Arm]], cells: Mapping[Key, Cell]) -> dict[str, list[dict[str, Any]]]:
    """The tables, printed."""
    results = {name: table_rows(arms, cells) for name, arms in chosen.items() if name != "repeating"}
    if "copying" in chosen:
        results |= parted_rows(chosen["copying"], cells, "copied", "not_copied", copies)
    if "repeating" in chosen:
        results |= parted_rows(chosen["repeating"], cells, "repeating", "others", repeats)
    for name, rows in results.items():
        show(TITLES.get(name, name), rows)
    return results


def verdict(results: Mapping[str, Sequence[Mapping[str, Any]]], missing: Sequence[str] = ()) -> bool:
    """Whether all came out as it must, in words. `missing`: what was asked for and could not be measured."""
    lines = [line for rows in results.values() for line in rows]
    different = sum(not line["identical"] for line in lines)
    print(f"\n{len(lines)} rows; outputs differ from plain decoding's in {different}")
    for what in missing:
        print(f"NOT COMPLETE: {what}")
    good = not different and not missing
    for what, most in MOST_PASSES.items():
        method, _, where = what.partition(" on ")
        table = "copying" if where == "copying" else "repeating"
        if table not in results:
            continue
        share = next((line["of_plain"] for line in results[table] if line["arm"] == method), None)
        enough = share is not None and share <= most
        good = good and enough
        words = "nothing was measured" if share is None else f"{share:.3f} of plain decoding's passes, {most} at most"
        print(f"{what}: {words}: {'as it must' if enough else 'NOT ENOUGH IS SAVED'}")
    return good
