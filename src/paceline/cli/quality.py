"""`paceline quality MODEL`: what a weight layout and its activations cost, against the same weights dequantised."""

import argparse
import json
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError

TEXT = "quality_text.txt"


def add_parser(subparsers: Any) -> None:
    from paceline.cli.options import DTYPE_HELP

    parser = subparsers.add_parser(
        "quality",
        help="what a weight layout costs: KL, top-1 agreement, perplexity",
        description="Compare a model's next-token distributions with those of the same weights dequantised, over a "
        "text that comes with Paceline: mean KL divergence (nats), the share of positions with the same most likely "
        "token, and the perplexity of both.",
    )
    parser.add_argument("model", metavar="MODEL", help="as --model of `paceline generate`")
    parser.add_argument("--dtype", default="file", help=DTYPE_HELP)
    parser.add_argument("--reference-dtype", default="fp32", metavar="DTYPE",
        help="the precision of the reference (default: %(default)s)")  # fmt: skip
    parser.add_argument("--text", type=Path, metavar="FILE", help="another text")
    parser.add_argument("--max-tokens", type=int, default=1024, metavar="N", help="of the text (default: %(default)s)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: one a core)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from paceline.cli.loading import load, require_tokenizer
    from paceline.models.quality import compare

    shared = argparse.Namespace(model=args.model, threads=args.threads, device="cpu", max_context=None)
    text = _text(args.text)
    model = load(argparse.Namespace(**vars(shared), dtype=args.dtype))
    ids = require_tokenizer(model).encode(text, add_special=False)[: args.max_tokens]
    if len(ids) < 2:
        raise PacelineError("the text has less than two tokens", hint="raise --max-tokens, or give a longer --text")
    reference = load(argparse.Namespace(**vars(shared), dtype=args.reference_dtype))
    quality = compare(model.decoder, reference.decoder, ids)
    if args.json:
        print(json.dumps({"model": args.model, "weights": model.treatment, "reference": reference.treatment,
            **asdict(quality)}))  # fmt: skip
        return 0
    print(f"{args.model}: {model.treatment}, against {reference.treatment}, {quality.tokens} tokens")
    print(
        f"mean KL {quality.mean_kl:.5f} · same top-1 {100 * quality.same_top1:.1f} % · "
        f"perplexity {quality.perplexity:.3f} (reference {quality.reference_perplexity:.3f})"
    )
    return 0


def _text(path: Path | None) -> str:
    if path is None:
        return resources.files("paceline.cli").joinpath(TEXT).read_text(encoding="utf-8")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PacelineError(f"cannot read {path}: {error}", hint="give a text file in UTF-8") from error
