"""`paceline methods [MODEL]`: the drafting methods there are, and which of them a model is ready for."""

import argparse
import json
import textwrap
from pathlib import Path
from typing import Any

from paceline.drafters.registry import METHODS, OF_METHODS, Method, find, names
from paceline.errors import PacelineError

NEEDED = {"nothing": "-", "model": "draft model", "head": "head", "methods": "methods"}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "methods",
        help="list the drafting methods, and what a model has for each",
        description="List the drafting methods; for a MODEL, which it is ready for: its defaults, and the draft heads "
        "found in the package, in its folder, in the Hub's cache and in --heads. No weights are loaded.",
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="as --model of `paceline generate`")
    parser.add_argument("--heads", action="append", default=[], metavar="FOLDER",
        help="look for draft heads here too, and one level below; may be repeated")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    for folder in args.heads:
        if not Path(folder).is_dir():
            raise PacelineError(f"--heads {folder} is not a folder", hint="name a folder that holds draft heads")
    if args.heads and args.model is None:
        raise PacelineError("--heads needs a MODEL for the heads to fit", hint="paceline methods MODEL --heads FOLDER")
    listed = [_describe(name) for name in names()]
    if args.model is not None:
        _look_at(args.model, [Path(folder) for folder in args.heads], listed)
    if args.json:
        print(json.dumps({"model": args.model, "methods": listed}, indent=1))
    else:
        _print(listed, args.model)
    return 0


def _describe(name: str) -> dict[str, Any]:
    """A method whose package does not load is listed with its error."""
    try:
        method = find(name)
    except PacelineError as error:
        return {"name": name, "error": str(error)}
    return {
        "name": name,
        "summary": method.summary,
        "needs": method.needs,
        "drafts": list(method.shapes),
        "lossless_rules": list(method.rules),
        "options": _options(name, method),
        "paper": method.paper or None,
        "built_in": name in METHODS,
    }


def _options(name: str, method: Method) -> list[str]:
    """Those that draft by others take their options as well, which are listed with them."""
    return ["methods"] if name in OF_METHODS else sorted(method.options)


def _look_at(model: str, folders: list[Path], listed: list[dict[str, Any]]) -> None:
    """Add to each method what the model has for it: its defaults, or heads that fit and heads that don't."""
    from paceline.models.head_search import find_heads, hub_folders
    from paceline.models.load import resolve
    from paceline.models.progress import terminal_progress
    from paceline.models.shipped import heads_for

    source = resolve(model, terminal_progress())
    config = source.describe()
    own = Path(model).expanduser()
    heads = find_heads([*folders, *([own] if own.is_dir() else []), *hub_folders()], config)
    heads = [*heads_for(config, source.fingerprint), *heads]
    for method in listed:
        needs = method.get("needs")
        mine = [head for head in heads if head.kind == method["name"]] if needs == "head" else []
        method["defaults"] = _defaults(method["name"], config.num_layers)
        method["heads"] = [str(head.path) for head in mine if head.misfit is None]
        method["misfits"] = [{"path": str(head.path), "why": head.misfit} for head in mine if head.misfit is not None]
        method["ready"] = needs in ("nothing", "methods") or bool(method["heads"])


def _defaults(name: str, num_layers: int) -> dict[str, Any]:
    """What the methods that run the model's own layers do unless told otherwise."""
    from paceline.drafters.early_exit import default_exit
    from paceline.drafters.layer_skip import default_skips

    match name:
        case "layer_skip":
            skips = list(default_skips(num_layers))
            return {"skip_attention_layers": skips, "skip_mlp_layers": skips}
        case "early_exit":
            return {"early_exit_layer": default_exit(num_layers)}
    return {}


def _print(listed: list[dict[str, Any]], model: str | None) -> None:
    known = [method for method in listed if "error" not in method]
    rows = [["METHOD", "NEEDS", "DRAFTS", "LOSSLESS UNDER", "WHAT IT DRAFTS" if model is None else f"WITH {model}"]]
    for method in known:
        last = method["summary"] if model is None else _state(method)
        drafts, rules = " or ".join(method["drafts"]), ", ".join(method["lossless_rules"])
        rows.append([method["name"], NEEDED[method["needs"]], drafts if method["name"] != "none" else "-", rules, last])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print("\nOPTIONS: keys of speculative_config, besides method, num_speculative_tokens")
    for method in known:
        if method["options"]:
            lines = textwrap.wrap(", ".join(method["options"]), 120 - widths[0] - 2, break_on_hyphens=False)
            for head, line in zip([method["name"], *[""] * len(lines)], lines, strict=False):
                print(f"{head.ljust(widths[0])}  {line}")
    for method in listed:
        if "error" in method:
            print(f"\n{method['name']}: {method['error']}")


def _state(method: dict[str, Any]) -> str:
    """In words, what a model has for a method."""
    match method:
        case {"needs": "model"}:
            return "ready with --draft-model NAME"
        case {"needs": "head", "heads": [head, *others]}:
            return f"ready: head {head}" + (f" and {len(others)} more" if others else "")
        case {"needs": "head", "misfits": [misfit, *_]}:
            return f"no head: {misfit['path']} does not fit, {misfit['why']}"
        case {"needs": "head"}:
            return "no head found"
        case {"defaults": {"early_exit_layer": layer}}:
            return f"ready: exits after {layer} layer{'s' * (layer > 1)}"
        case {"defaults": {"skip_mlp_layers": skips}}:
            return f"ready: leaves out layer{'s' * (len(skips) > 1)} {', '.join(map(str, skips))}"
    return "ready"
