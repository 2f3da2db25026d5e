"""How much of a draft is kept, by methods that need no other model: counts, on one model, greedy, EOS ignored.

    python bench/acceptance.py [--model smollm2-135m] [--table early_exit copying …]

early_exit: an exit after every layer there is, stopping as by default. always (long): the same, never stopping before
K tokens. layer_skip: the default sublayers, and the best found by

    paceline tune layer-skip --prompts bench/tuning_prompts.txt --log bench/results/layer_skip_search-MODEL.jsonl \\
        --num-draft-tokens 4

on other prompts than those here; without its log the table is not complete, which is a failure. copying: prompts that
ask for a text again, as it is or edited; over all of them ngram must save half of the target's passes. A small model
often writes something else instead: so prompts that are really copied from (half of the answer's 4-grams stand in the
prompt) are counted apart as well, from the others. repeating: the answers to chat prompts and templates, apart by
whether they repeat themselves, which is if half of their 4-grams stood in them before; on those, lookahead must save a
quarter of the passes.

All prompts of a set run in one batch, which changes no count (but suffix then has no earlier answers to draft from).
Draft share: of the CPU time, not of the time on the clock, of those steps of the batch that only decode. Cells are
appended to a log as they are done; a run takes up where the last one of the same code stopped. The last line is one
JSON object.
"""

from script import Remaining, resumable

# isort: split
import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from acceptance_cells import Cell, measure
from acceptance_prompts import CHAT, COPYING, TEMPLATES
from acceptance_tables import PLAIN, Arm, Config, Key, best_skips, key, report, row, tables, verdict
from provenance import provenance
from resumed import fingerprint, read, sources

from paceline.models.load import LoadedModel, load_model
from paceline.models.progress import terminal_progress

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(tables(1, None))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--table", nargs="+", choices=names, default=names[:-1], help="default: all but always")
    parser.add_argument("--first", type=int, help="how many prompts of each set (default: all)")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--search", type=Path, help="default: bench/results/layer_skip_search-MODEL.jsonl")
    parser.add_argument("--log", type=Path, help="default: bench/results/acceptance-MODEL-DTYPE.jsonl")
    parser.add_argument("--result", type=Path, help="write the JSON object here, too")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    model = load_model(args.model, dtype=args.dtype, progress=terminal_progress())
    prompts = prompt_sets(model, args.first)
    name = Path(args.model).name
    search = args.search or RESULTS / f"layer_skip_search-{name}.jsonl"
    tuned = best_skips(search)
    missing = []
    if tuned is None and "layer_skip" in args.table:
        missing = [f"layer_skip's best set of sublayers is left out: no trial is in {search}"]
        print(*missing, file=sys.stderr)
    chosen = {name: arms for name, arms in tables(model.config.num_layers, tuned).items() if name in args.table}
    log = args.log or RESULTS / f"acceptance-{name}-{args.dtype}.jsonl"
    code = f"{fingerprint(code_files())} {args.tokens} {args.first}"
    cells = run(model, prompts, chosen, args.tokens, log, code)

    result = {
        "provenance": provenance(),
        "model": args.model,
        "precision": model.precision,
        "exact": model.exact,
        "tokens": args.tokens,
        "plain": {own: asdict(cells[key(own, PLAIN)])["answers"] for own in prompts if key(own, PLAIN) in cells},
        "missing": missing,
        "tables": report(chosen, cells),
    }
    if args.result:
        args.result.write_text(json.dumps(result, indent=1) + "\n")
    good = verdict(result["tables"], missing)
    print(json.dumps(result))
    return 0 if good else 1


def prompt_sets(model: LoadedModel, first: int | None) -> dict[str, list[list[int]]]:
    tokenizer = model.tokenizer
    assert tokenizer is not None
    chat = [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in CHAT[:first]]
    raw = {"copying": COPYING, "templates": TEMPLATES}
    return {"chat": chat} | {
        name: [tokenizer.encode(text, add_special=True) for text in texts[:first]] for name, texts in raw.items()
    }


def run(
    model: LoadedModel,
    prompts: Mapping[str, Sequence[Sequence[int]]],
    chosen: Mapping[str, Sequence[Arm]],
    tokens: int,
    log: Path,
    code: str,
) -> dict[Key, Cell]:
    """All cells of the chosen tables, those of the log among them; plain decoding of a set comes before its others."""
    cells = {key(cell.prompts, cell.config): cell for cell in map(Cell.parse, read(log, code))}
    wanted: dict[Key, Config] = {}
    for arm in (arm for arms in chosen.values() for arm in arms):
        for name in arm.sets:
            wanted |= {key(name, config): config for config in (PLAIN, arm.config)}
    todo = [cell for cell in wanted if cell not in cells]
    print(f"{model.name}, exact: {model.exact}; {len(wanted) - len(todo)} of {len(wanted)} cells are done", flush=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    remaining = Remaining(len(todo))
    with log.open("a") as file, resumable():
        if todo:
            facts = provenance() | {"exact": model.exact}
            print(json.dumps({"provenance": facts, "code": code}), file=file, flush=True)
        for cell_key in todo:
            name, config = cell_key[0], wanted[cell_key]
            cell = cells[cell_key] = measure(model, name, prompts[name], config, tokens)
            print(json.dumps(asdict(cell) | {"code": code}), file=file, flush=True)
            own = row(name, cell.answers, cells[key(name, PLAIN)].answers)
            words = "outputs identical" if own["identical"] else "outputs DIFFERENT"
            length = f"acceptance length {own['acceptance_length']:.3f}"
            print(f"{name} {config}: {length}, {words}; {remaining.after_one_more()}", flush=True)
    return cells


def code_files() -> list[Path]:
    """All that a cell depends on."""
    own = [ROOT / "bench" / name for name in ("acceptance_cells.py", "acceptance_prompts.py", "prompts.py")]
    return [*sources("core", "ops", "models", "drafters", "engine"), *own]


if __name__ == "__main__":
    sys.exit(main())
