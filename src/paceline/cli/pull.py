"""`paceline pull NAME`: download a model of the catalog or the Hub."""

import argparse
import sys
from typing import Any


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "pull",
        help="download a model",
        description="Download a model and print where it lies. A re-run fetches only the files that have not arrived "
        "whole.",
    )
    parser.add_argument("name", help="a name of `paceline models`, or a Hub id: owner/name[@revision][:file.gguf]")


def run(args: argparse.Namespace) -> int:
    from paceline.errors import PacelineError
    from paceline.models import catalog
    from paceline.models.download import pull
    from paceline.models.hub import HubId
    from paceline.models.progress import terminal_progress

    hub_id = HubId.parse(args.name)
    if args.name not in catalog.CATALOG and hub_id is not None:
        print(hub_id.fetch())
        return 0
    try:
        entry = catalog.find(args.name)
    except PacelineError as error:
        hint = error.hint if catalog.closest_alias(args.name) else f"{error.hint}; or a Hub id: owner/name"
        raise PacelineError(str(error), hint) from error
    print(pull(entry, terminal_progress()))
    print(f"{entry.title}, licence: {entry.licence}", file=sys.stderr)
    return 0
