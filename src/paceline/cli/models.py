"""`paceline models`: what the catalog offers and what is on disk; `paceline models rm NAME` deletes it."""

import argparse
import json
import sys
from typing import Any


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "models",
        help="list or delete models",
        description="List the catalog's models, the downloads and the prepared weights on this machine.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    actions = parser.add_subparsers(title="actions", dest="action", metavar="ACTION")
    rm = actions.add_parser(
        "rm",
        help="delete a download and its prepared weights",
        description="Delete stored models; asks nothing.",
    )
    rm.add_argument("names", nargs="+", metavar="NAME", help="a name as `paceline models` lists it")


def run(args: argparse.Namespace) -> int:
    if args.action == "rm":
        return _remove(args.names)
    report = _report()
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        _print(report)
    return 0


def _remove(names: list[str]) -> int:
    from paceline.models.home import megabytes
    from paceline.models.inventory import stored_as

    for stored in [stored_as(name) for name in names]:  # an unknown name is refused before anything is deleted
        download, prepared = stored.download_size, stored.prepared_size
        stored.delete()
        detail = f" (download {megabytes(download)}, prepared weights {megabytes(prepared)})"
        total = download + prepared
        print(f"{stored.name}: freed {megabytes(total)}{detail}" if total else f"{stored.name}: nothing was stored")
    return 0


def _report() -> dict[str, Any]:
    from paceline.models.catalog import CATALOG
    from paceline.models.download import is_downloaded
    from paceline.models.home import home
    from paceline.models.inventory import PreparedCopy, downloaded_size, prepared_copies

    def describe(copy: PreparedCopy) -> dict[str, Any]:
        return {"precision": copy.precision, "size": copy.size, "path": str(copy.folder)}

    copies = prepared_copies()
    known = {entry.sha256 for entry in CATALOG.values()}
    return {
        "home": str(home()),
        "catalog": [
            {
                "name": entry.alias,
                "title": entry.title,
                "licence": entry.licence,
                "size": entry.size,
                "downloaded": is_downloaded(entry),
                "size_on_disk": downloaded_size(entry),
                "path": str(entry.path),
                "prepared": [describe(copy) for copy in copies if copy.source_sha256 == entry.sha256],
            }
            for entry in CATALOG.values()
        ],
        "prepared": [{"name": copy.label, **describe(copy)} for copy in copies if copy.source_sha256 not in known],
    }


def _print(report: dict[str, Any]) -> None:
    from paceline.models.home import megabytes

    def prepared(model: dict[str, Any]) -> str:
        return ", ".join(f"{copy['precision']} {megabytes(copy['size'])}" for copy in model["prepared"]) or "-"

    def state(model: dict[str, Any]) -> str:
        if model["downloaded"]:
            return "downloaded"
        return f"partial {megabytes(model['size_on_disk'])}" if model["size_on_disk"] else "-"

    rows = [["NAME", "SIZE", "LICENCE", "DOWNLOAD", "PREPARED", "MODEL"]]
    for model in report["catalog"]:
        row = [model["name"], megabytes(model["size"]), model["licence"], state(model), prepared(model)]
        rows.append([*row, model["title"]])
    for copy in report["prepared"]:
        size = f"{copy['precision']} {megabytes(copy['size'])}"
        rows.append([copy["name"], "-", "-", "-", size, "a file of your own"])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print(f"stored in {report['home']}", file=sys.stderr)
