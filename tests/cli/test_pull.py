"""`paceline pull` and `paceline models`, by what they print and how they end."""

import hashlib
import json
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.models import catalog, home
from paceline.models.catalog import CatalogEntry

CONTENT = b"GGUF" + bytes(1_999_996)


class Source:
    """A catalog source at hand: writes the content, or fails as it is told."""

    def __init__(self, failure: BaseException | None = None) -> None:
        self.failure = failure

    def describe(self) -> str:
        return "at hand"

    def fetch(self, partial: Path, size: int, name: str, progress: home.Progress) -> None:
        partial.write_bytes(CONTENT[: 1_000_000 if self.failure else None])
        progress(f"downloading {name}", size // 2, size)
        if self.failure:
            raise self.failure
        progress(f"downloading {name}", size, size)


def entry(failure: BaseException | None = None) -> CatalogEntry:
    digest = hashlib.sha256(CONTENT).hexdigest()
    return CatalogEntry("toy-1b", "Toy 1B", "MIT", "toy.gguf", len(CONTENT), digest, (Source(failure),))


@pytest.fixture(autouse=True)
def toy(tmp_path, monkeypatch) -> CatalogEntry:
    """A catalog of one model, in an empty PACELINE_HOME."""
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    monkeypatch.setattr(catalog, "CATALOG", {"toy-1b": entry()})
    monkeypatch.setattr("paceline.models.inventory.CATALOG", catalog.CATALOG)
    return catalog.CATALOG["toy-1b"]


def prepare(folder: str, label: str, sha256: str, size: int) -> Path:
    path = home.prepared_folder() / folder
    path.mkdir(parents=True)
    (path / "weights.bin").write_bytes(bytes(size))
    manifest = {"label": label, "source_sha256": sha256, "precision": folder.rpartition("-")[2]}
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path


def test_pull_prints_the_path_and_nothing_else_on_stdout(toy, capsys):
    assert main(["pull", "toy-1b"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{toy.path}\n" and toy.path.read_bytes() == CONTENT
    assert "downloading toy-1b: 50 %" in err and "licence: MIT" in err


def test_unknown_name_names_the_closest(capsys):
    assert main(["pull", "toy"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "error: 'toy' is not in the catalog",
        "hint: did you mean toy-1b?",
    ]
    assert main(["pull", "qqqq"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "error: 'qqqq' is not in the catalog",
        "hint: known: toy-1b; or a Hub id: owner/name",
    ]


def test_interrupt_ends_with_one_line_and_a_partial_download(monkeypatch, capsys):
    monkeypatch.setitem(catalog.CATALOG, "toy-1b", entry(KeyboardInterrupt()))
    assert main(["pull", "toy-1b"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted"
    assert main(["models"]) == 0
    assert "partial 1.0 MB" in capsys.readouterr().out
    monkeypatch.setitem(catalog.CATALOG, "toy-1b", entry())
    assert main(["pull", "toy-1b"]) == 0


def test_no_space_is_one_line(monkeypatch, capsys):
    monkeypatch.setitem(catalog.CATALOG, "toy-1b", entry(OSError(28, "No space left on device")))
    assert main(["pull", "toy-1b"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[-2].startswith("error: cannot write ") and lines[-2].endswith("No space left on device")
    assert lines[-1].startswith("hint: ")


def test_hub_id_goes_to_the_hub(monkeypatch, capsys, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda repo, **kwargs: str(tmp_path))
    assert main(["pull", "owner/name@main"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}\n"


def test_list_and_its_json(toy, capsys):
    main(["pull", "toy-1b"])
    prepare("abc-bf16", "toy.gguf", toy.sha256, 3_000_000)
    prepare("def-fp32", "mine.gguf", "00", 1_000_000)
    capsys.readouterr()
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["toy-1b", "2.0", "MB", "MIT", "downloaded", "bf16", "3.0", "MB", "Toy", "1B"]
    assert lines[2].split()[:7] == ["mine.gguf", "-", "-", "-", "fp32", "1.0", "MB"]
    assert main(["models", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    (model,) = report["catalog"]
    assert (model["name"], model["size"], model["licence"], model["downloaded"]) == (
        "toy-1b",
        2_000_000,
        "MIT",
        True,
    )
    assert [copy["precision"] for copy in model["prepared"]] == ["bf16"]
    assert [(copy["name"], copy["precision"]) for copy in report["prepared"]] == [("mine.gguf", "fp32")]


def test_listing_an_empty_home(capsys):
    assert main(["models", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["prepared"] == [] and not report["catalog"][0]["downloaded"]


def test_rm_deletes_the_download_and_what_was_prepared_from_it(toy, capsys):
    main(["pull", "toy-1b"])
    own = prepare("abc-bf16", "toy.gguf", toy.sha256, 3_000_000)
    other = prepare("def-fp32", "mine.gguf", "00", 1_000_000)
    capsys.readouterr()
    assert main(["models", "rm", "toy-1b"]) == 0
    said = capsys.readouterr().out
    assert said == "toy-1b: freed 5.0 MB (download 2.0 MB, prepared weights 3.0 MB)\n"
    assert not toy.path.exists() and not own.exists() and other.exists()
    assert main(["models", "rm", "toy-1b"]) == 0
    assert capsys.readouterr().out == "toy-1b: nothing was stored\n"


def test_rm_of_prepared_weights_by_label(capsys):
    other = prepare("def-fp32", "mine.gguf", "00", 1_000_000)
    assert main(["models", "rm", "mine.gguf"]) == 0
    assert not other.exists() and "freed 1.0 MB" in capsys.readouterr().out


def test_rm_of_an_unknown_name_deletes_nothing(toy, capsys):
    main(["pull", "toy-1b"])
    capsys.readouterr()
    assert main(["models", "rm", "toy-1b", "toy-1"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "error: nothing is stored under the name 'toy-1'",
        "hint: did you mean toy-1b?",
    ]
    assert toy.path.exists()


@pytest.mark.parametrize("name", ["..", "../x", "", "."])
def test_rm_stays_inside(toy, name, capsys):
    main(["pull", "toy-1b"])
    assert main(["models", "rm", name]) == 1
    assert toy.path.exists()
