"""Not one token changes: every method and K against plain decoding, token by token.

Default: SmolLM2-135M in bf16, 20 prompts (4 above 700 tokens) × greedy and seeded × ngram and draft_model (the
target's own first 10 layers, which are nearly always wrong; on every fourth prompt also all but its last, which are
often right) × K 1, 3, 5, 8, 64 tokens with end-of-sequence ignored, against plain decoding of one row at a time. Cells
are appended to a log as they are done; a run takes up where the last one of the same code stopped.

    python bench/verify_matrix.py
    python bench/verify_matrix.py --model qwen2.5-coder-1.5b --draft-model qwen2.5-coder-0.5b --prompts 3
"""

from script import Remaining, resumable

# isort: split
import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from matrix import PARAMS, Cell, run_matrix, uncovered_positions
from prompts import LONG, PROMPTS
from provenance import provenance
from resumed import fingerprint, read, sources

from paceline.drafters.base import Drafter
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.ngram import NgramDrafter
from paceline.models.load import load_model
from paceline.models.progress import terminal_progress

ROOT = Path(__file__).parent.parent
DRAFT_LAYERS = 10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument(
        "--draft-model", help=f"default: the target's first {DRAFT_LAYERS} layers, and all but its last"
    )
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help="how many of the prompts (default: all)")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--k", type=int, nargs="+", default=[1, 3, 5, 8])
    parser.add_argument("--log", type=Path, help="default: bench/results/verify_matrix-MODEL-DTYPE.jsonl")
    args = parser.parse_args()

    target = load_model(args.model, dtype=args.dtype, progress=terminal_progress())
    assert target.tokenizer is not None
    drafters: dict[str, Callable[[], Drafter]] = {"ngram": NgramDrafter}
    often_right = f"first {target.config.num_layers - 1} layers"
    if args.draft_model is None:
        for count in (DRAFT_LAYERS, target.config.num_layers - 1):
            drafters[f"first {count} layers"] = partial(DraftModelDrafter, target.decoder.first_layers(count))
    else:
        draft = load_model(args.draft_model, args.dtype, progress=terminal_progress()).decoder
        drafters[args.draft_model] = partial(DraftModelDrafter, draft)
    # a long prompt among the first few, so that a short run sees one
    chosen = [LONG[0], *(prompt for prompt in PROMPTS if prompt != LONG[0])][: args.prompts]
    prompts = [target.tokenizer.apply_chat_template([{"role": "user", "content": prompt}]) for prompt in chosen]

    log = args.log or Path(__file__).parent / "results" / f"verify_matrix-{args.model}-{args.dtype}.jsonl"
    code = f"{fingerprint(code_files())} {args.tokens}"
    cells = [_cell(row) for row in read(log, code)]
    log.parent.mkdir(parents=True, exist_ok=True)
    keys = set(product(range(len(prompts)), PARAMS, drafters, args.k))
    left_out = {key for key in keys if key[2] == often_right and key[0] % 4}
    total = len(keys - left_out)
    print(f"{target.name} {args.dtype}, exact: {target.exact}; {len(cells)} of {total} cells are done", flush=True)
    remaining = Remaining(total - len(cells))
    with log.open("a") as file, resumable():
        if len(cells) < total:
            facts = provenance() | {"exact": target.exact}
            print(json.dumps({"provenance": facts, "code": code}), file=file, flush=True)
        skip = left_out | {cell.key for cell in cells}
        for cell in run_matrix(target.decoder, prompts, drafters, args.k, args.tokens, skip):
            cells.append(cell)
            print(json.dumps(asdict(cell) | {"code": code}), file=file, flush=True)
            print(f"{describe(cell, len(cells), total)}; {remaining.after_one_more()}", flush=True)
    return summarise(cells)


def code_files() -> list[Path]:
    """All that a cell depends on."""
    own = [ROOT / "bench" / name for name in ("matrix.py", "prompts.py", "verify_matrix.py")]
    return [*sources("core", "ops", "models", "drafters"), ROOT / "src" / "paceline" / "decode.py", *own]


def _cell(row: dict[str, Any]) -> Cell:
    return Cell(**{**row, "accepted_at": tuple(row["accepted_at"]), "rejected_at": tuple(row["rejected_at"])})


def describe(cell: Cell, number: int, total: int) -> str:
    verdict = "identical" if cell.identical else f"DIFFERENT from token {cell.first_difference}"
    return (
        f"{number:4d}/{total} prompt {cell.prompt} ({cell.prompt_tokens} tokens) {cell.params} {cell.drafter} "
        f"K {cell.k}: {cell.drafted} drafted, {cell.accepted} accepted, {cell.passes} passes: {verdict}"
    )


def summarise(cells: list[Cell]) -> int:
    different = [cell for cell in cells if not cell.identical]
    missing = uncovered_positions(cells)
    for line in missing:
        print(f"note: {line}")
    print(
        f"{len(cells)} cells, {sum(cell.tokens for cell in cells)} tokens: "
        f"{len(different)} cells differ from plain decoding; "
        f"{sum(cell.drafted for cell in cells)} drafted, {sum(cell.accepted for cell in cells)} accepted, "
        f"{sum(cell.passes for cell in cells)} passes"
    )
    return 1 if different or missing else 0


if __name__ == "__main__":
    sys.exit(main())
