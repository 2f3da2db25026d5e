"""The JSON object of a run: its schema is documented in docs/bench.md."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from paceline.bench.loops import find_loop
from paceline.bench.prompts import PromptSet
from paceline.bench.run import Run, Unit
from paceline.bench.specs import PLAIN
from paceline.bench.summary import differences, summarise

SCHEMA = 1


def rows_of(run: Run, prompts: PromptSet, seed: int) -> list[dict[str, Any]]:
    """The figures, row by row."""
    return summarise(run.units, prompts.conversations, run.labels, seed)


def result(
    run: Run, rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any], prompts: PromptSet, interrupted: bool
) -> dict[str, Any]:
    """Everything but the single measurements."""
    model, params = run.model, run.settings.params
    different = differences(run.units, prompts.conversations)
    own = {spec.label for spec in run.specs}
    return {
        "schema": SCHEMA,
        "provenance": dict(facts),
        "model": {
            "name": model.name,
            "precision": model.precision,
            "device": str(model.decoder.device),
            "exact": model.exact,
            "load_s": model.load_seconds,
        },
        "settings": {
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "seed": params.seed,
            "ignore_eos": params.ignore_eos,
            "raw": run.settings.raw,
        },
        "prompts": {"source": prompts.source, "sha256": prompts.sha256, "categories": prompts.categories},
        "arms": [
            *({"label": spec.label, "kind": "method", **_described(run, spec.label)} for spec in run.specs),
            *({"label": label, "kind": "peer"} for label in run.labels if label not in own),
        ],
        "left_out": [asdict(each) for each in run.left_out],
        "notes": list(run.notes),
        "rows": [dict(row) for row in rows],
        "differences": different,
        "broken_promise": model.exact == "bitwise" and any(each["arm"] in own for each in different),
        "interrupted": interrupted,
    }


def units(run: Run, prompts: PromptSet) -> list[dict[str, Any]]:
    """Every single measurement, for those who want to compute more."""
    return [_unit(unit, prompts) for unit in run.units]


def _described(run: Run, label: str) -> dict[str, Any]:
    config = next(spec.config for spec in run.specs if spec.label == label)
    given = {key: value for key, value in asdict(config).items() if value is not None}
    told = {"config": given, "build_memory_bytes": run.build_memory.get(label), "faults": run.faults[label]}
    return told | ({"choices": run.choices[label]} if label in run.choices else {})


def _unit(unit: Unit, prompts: PromptSet) -> dict[str, Any]:
    plain = unit.measured[PLAIN].answers
    return {
        "concurrency": unit.concurrency,
        "block": unit.block,
        "category": unit.category,
        "turn": unit.turn,
        "conversations": [prompts.conversations[member].id for member in unit.members],
        "loops": [find_loop(answer.token_ids) is not None for answer in plain],
        "measured": {
            label: {
                "seconds": measured.seconds,
                "tokens": [len(answer.token_ids) for answer in measured.answers],
                "first_s": [answer.first_s for answer in measured.answers],
                "answer_s": [answer.seconds for answer in measured.answers],
            }
            for label, measured in unit.measured.items()
        },
    }
