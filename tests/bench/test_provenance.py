"""Where figures come from."""

import json
import subprocess
from pathlib import Path

import pytest
import torch

from paceline.bench import memory
from paceline.bench.provenance import OthersWatch, is_busy, provenance, revision


def git(folder: Path, *words: str) -> None:
    who = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


def test_the_revision_is_the_packages_own_or_none(tmp_path: Path) -> None:
    """A package that is installed somewhere within another project's checkout has none."""
    own, foreign = tmp_path / "src" / "paceline", tmp_path / "env" / "paceline"
    for folder in (own, foreign):
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("")
    assert revision(own) is None
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "x")
    assert revision(foreign) is None
    clean = revision(own)
    assert clean and not clean.endswith("-dirty")
    (own / "__init__.py").write_text("changed")
    assert revision(own) == f"{clean}-dirty"


def test_what_busy_means() -> None:
    assert not is_busy(0.3, 2) and is_busy(0.31, 2)
    assert not is_busy(3.0, 64) and is_busy(3.3, 64)
    assert not is_busy(None, 2)


def test_the_facts_can_be_written_down() -> None:
    facts = provenance({"max_tokens": 3}, 0.9, ("torch", "no-such-package"))
    assert facts["busy"] == is_busy(0.9, facts["cores"]) and facts["arguments"] == {"max_tokens": 3}
    versions = facts["versions"]  # a package's metadata may lack the "+cu124" that it calls itself by
    assert versions["torch"].split("+")[0] == torch.__version__.split("+")[0] and "no-such-package" not in versions
    json.dumps(facts, allow_nan=False)


def test_ones_own_work_is_not_others() -> None:
    watch = OthersWatch(busy_s=100.0, own_s=40.0, wall_s=0.0)
    with pytest.MonkeyPatch.context() as patch:
        module = "paceline.bench.provenance"
        patch.setattr(f"{module}._busy_seconds", lambda: 130.0)
        patch.setattr(f"{module}._own_seconds", lambda: 55.0)
        patch.setattr(f"{module}.time.perf_counter", lambda: 10.0)
        assert watch.cores() == 1.5
        patch.setattr(f"{module}._busy_seconds", lambda: None)
        assert watch.cores() is None


def test_the_highest_memory_is_that_of_a_turn() -> None:
    cpu = torch.device("cpu")
    if not memory.reset_peak(cpu):
        pytest.skip("this system does not let a process reset its high-water mark")
    before = memory.peak(cpu)
    block = torch.ones(64 << 20, dtype=torch.uint8)
    high = memory.peak(cpu)
    assert before is not None and high is not None and high - before >= 60 << 20
    del block
    memory.reset_peak(cpu)
    after = memory.peak(cpu)
    assert after is not None and after < high - (30 << 20)
