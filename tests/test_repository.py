"""Promises that the repository makes about itself: sizes, texts, packaging, documents that run."""

import ast
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest

from paceline.drafters.registry import METHODS

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MODULES = sorted((ROOT / "src").rglob("*.py"))
MOST_LINES = 500  # of a module: what fits in a head

TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".json", ".jsonl", ".sh", ".yaml", ".yml", ".cfg", ""}
NOT_OURS = {".git", ".venv", ".venv-oldest", "LICENSE", "build", "dist"}


def texts() -> Iterator[Path]:
    """Files of the repository that people write and read."""
    for path in ROOT.rglob("*"):
        first = path.relative_to(ROOT).parts[0]
        caches = any(part.endswith("_cache") or part in ("__pycache__", ".hypothesis") for part in path.parts)
        if first not in NOT_OURS and not caches and path.is_file() and path.suffix in TEXT_SUFFIXES:
            yield path


def test_no_module_is_too_long() -> None:
    long = {
        str(path.relative_to(ROOT)): n for path in MODULES if (n := len(path.read_text().splitlines())) > MOST_LINES
    }
    assert not long, f"split these: {long}"


def test_no_text_names_a_place_on_some_machine() -> None:
    """Home folders and mounts of whoever wrote it. `/tmp` and `/proc` are everywhere."""
    place = re.compile(r"(?<![\w.~}])/(?:work|root|home|Users|mnt|opt|data)/\w")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in texts()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if place.search(line) and path != Path(__file__)
    ]
    assert not found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT / "src")))
def test_every_module_says_what_it_is_for(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert not tree.body or ast.get_docstring(tree)


def test_the_package_is_typed() -> None:
    assert resources.files("paceline").joinpath("py.typed").is_file()


def requirements() -> dict[str, str]:
    """Lower bound by package, of what is installed to run the tests."""
    declared = PROJECT["project"]["dependencies"] + PROJECT["project"]["optional-dependencies"]["test"]
    return dict(requirement.split(">=") for requirement in declared)


def pinned(path: str) -> dict[str, str]:
    lines = [line for line in (ROOT / path).read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("==") for line in lines)


def test_every_lower_bound_is_one_that_test_oldest_tries() -> None:
    assert pinned("constraints/oldest.txt") == requirements()


def test_what_the_package_imports_is_what_it_declares() -> None:
    def top_level(path: Path) -> Iterator[str]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from (alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                yield str(node.module).split(".")[0]

    imported = {name for path in MODULES for name in top_level(path)}
    foreign = imported - set(sys.stdlib_module_names) - {"paceline"}
    declared = PROJECT["project"]["dependencies"] + PROJECT["project"]["optional-dependencies"]["train"]
    assert foreign == {requirement.split(">=")[0] for requirement in declared}


# Commands that need no model; the others download one.
CHEAP = ("--help", "--version", "paceline models", "paceline methods")


def blocks(document: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / document).read_text(), re.DOTALL | re.MULTILINE)


def test_the_commands_of_the_readme() -> None:
    """The cheap ones are run; of the others the options are known to the parser."""
    lines = [line for block in blocks("README.md", "sh") for line in block.splitlines() if line]
    assert len(lines) > 5
    helps = {
        verb: subprocess.run([sys.executable, "-m", "paceline", verb, "--help"], capture_output=True, text=True).stdout
        for verb in ("generate", "bench")
    }
    for line in lines:
        if any(part in line for part in CHEAP):
            words = shlex.split(line)
            assert words[0] == "paceline"
            subprocess.run([sys.executable, "-m", *words], capture_output=True, check=True)
        elif line.startswith("make"):
            target = line.split()[1]
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target
        else:
            verb = line[line.index("paceline ") :].split()[1]
            for option in re.findall(r"(?<= )--?[a-z][\w-]*", line):
                assert re.search(rf"(?<![\w-]){option}(?![\w-])", helps[verb]), option


@pytest.mark.model
def test_the_python_of_the_readme() -> None:
    code = blocks("README.md", "python")
    assert code
    for block in code:
        result = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr
        assert result.stdout


def test_documents_link_to_files_that_exist() -> None:
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text()):
            assert (document.parent / target).exists(), f"{document}: {target}"


def test_the_table_of_methods_is_the_registrys_and_each_has_a_section() -> None:
    written = (ROOT / "docs/methods.md").read_text()
    script = "import sys; sys.path.insert(0, 'docs'); import methods_table; sys.stdout.write(methods_table.page())"
    right = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert written == right, "run: python docs/methods_table.py"
    assert re.findall(r"^## (\w+)$", written, re.MULTILINE) == list(METHODS)
    for name, section in re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", written, re.DOTALL | re.MULTILINE):
        papers = re.findall(r"\d{4}\.\d{5}", METHODS[name].paper)
        assert "Cost a step:" in section and "Pays" in section and all(paper in section for paper in papers), name


def test_the_layers_hold() -> None:
    """`make layers`, here too, so that `make test` alone cannot pass with an import that points up."""
    pytest.importorskip("importlinter", reason="a tool of the dev extra")
    script = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_an_upward_import_is_caught(tmp_path: Path) -> None:
    """The contract itself, on a copy with one import too many."""
    pytest.importorskip("importlinter", reason="a tool of the dev extra")
    import shutil

    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "src/paceline/core/wrong.py").write_text("import paceline.models.config\n")
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'src')!r})\n"
        "from importlinter.cli import lint_imports_command; lint_imports_command()"
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 1, result.stdout
    assert "paceline.core.wrong" in result.stdout
