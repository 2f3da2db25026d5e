"""`paceline export`: a drafter in the format of another engine."""

import argparse
import json
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError

# What `paceline.export.formats` holds, which itself would import torch; a test compares.
FORMATS = {
    "eagle": "EAGLE-1/2 as its authors publish it",
    "eagle3": "EAGLE-3 as its authors publish it",
    "speculators": "EAGLE-3 for vLLM's speculators",
    "medusa": "Medusa as its authors publish it",
    "medusa-vllm": "Medusa for vLLM",
    "hf": "a model as a Hugging Face folder",
}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "export",
        help="write a drafter for another engine",
        description="Write a draft head, or a whole model, in another engine's format. "
        + "; ".join(f"{name}: {what}" for name, what in FORMATS.items()),
    )
    add = parser.add_argument
    add("source", metavar="DRAFTER", help="a head's folder or Hub id; with --format hf any model")
    add("--format", required=True, choices=list(FORMATS), help="what to write")
    add("--out", "-o", required=True, metavar="FOLDER", help="a folder to write into; it must be empty or new")
    add("--model", "-m", default="smollm2-135m", metavar="NAME", help="the target it drafts for (default: %(default)s)")
    add("--dtype", default="auto", help="auto (the target's own), bf16, fp32 or fp64 (default: %(default)s)")
    add("--num-draft-tokens", "-k", type=int, default=3, metavar="K",
        help="what a speculators config tells its engine to draft (default: %(default)s)")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    out = Path(args.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise PacelineError(f"--out {out} is there already, and not an empty folder", hint="name a new one")
    if args.num_draft_tokens < 1:
        raise PacelineError(f"--num-draft-tokens is {args.num_draft_tokens}; it must be 1 or more")
    from paceline.models.load import load_model
    from paceline.models.packing import PACKED
    from paceline.models.progress import terminal_progress

    if args.dtype in PACKED:
        raise PacelineError(f"--dtype {args.dtype} holds packed weights, which no format takes", hint="--dtype bf16")
    if args.format == "hf":
        _export_model(args, out)
    else:
        from paceline.export.formats import export_head

        target = load_model(args.model, dtype=args.dtype, progress=terminal_progress(), packed=False)
        exported = export_head(args.source, target, args.format, args.num_draft_tokens)
        out.mkdir(parents=True, exist_ok=True)
        exported.write(out)
    print(json.dumps({"folder": str(out), "format": args.format}))
    return 0


def _export_model(args: argparse.Namespace, out: Path) -> None:
    from paceline.models.hf_folder import write_hf_folder
    from paceline.models.load import resolve
    from paceline.models.progress import terminal_progress

    parts = resolve(args.source, terminal_progress()).read(
        None if args.dtype == "auto" else args.dtype, terminal_progress()
    )
    out.mkdir(parents=True, exist_ok=True)
    write_hf_folder(out, parts.config, parts.weights, parts.tokenizer)
