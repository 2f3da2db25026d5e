"""The table of methods.md, from the registry: `python docs/methods_table.py` writes it anew."""

from pathlib import Path

from paceline.drafters.registry import METHODS, OF_METHODS, Method

PAGE = Path(__file__).with_name("methods.md")
BEGIN, END = "<!-- table: python docs/methods_table.py -->\n", "<!-- end of the table -->\n"
NEEDS = {"nothing": "nothing", "model": "a draft model", "head": "a trained head", "methods": "two methods or more"}


def row(name: str, method: Method) -> str:
    options = ["methods"] if name in OF_METHODS else sorted(method.options)
    cells = (
        f"[`{name}`](#{name})",
        method.summary,
        NEEDS[method.needs],
        " or ".join(method.shapes) if name != "none" else "nothing",
        ", ".join(f"`{rule}`" for rule in method.rules),
        ", ".join(f"`{option}`" for option in options) or "none",
    )
    return f"| {' | '.join(cells)} |\n"


def table() -> str:
    head = "| method | drafts come from | needs | drafts | lossless under | options |\n|---|---|---|---|---|---|\n"
    return head + "".join(row(name, method) for name, method in METHODS.items())


def page() -> str:
    """The whole document with the table as it must be."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
