"""Prepared weights: written whole or not at all, mapped, made again when they are not what they should be."""

import json
import logging
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tiny_files import CONFIG

from paceline.errors import PacelineError
from paceline.models import home, store
from paceline.models.hf_config import config_from_hf
from paceline.models.store import PreparedKey, Recipe

KEY = PreparedKey("ab" * 32, "bf16")
TENSORS = {
    "odd": torch.arange(7, dtype=torch.float32),
    "bf16": torch.linspace(-3, 3, 30).to(torch.bfloat16).reshape(5, 6),
    "f64": torch.tensor([[1 / 3]], dtype=torch.float64),
    "turned": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4).T,
}


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))


class Builder:
    """A recipe that counts how often it was asked for."""

    def __init__(self, tensors=None) -> None:
        self.calls = 0
        self.tensors = TENSORS.items() if tensors is None else tensors

    def __call__(self) -> Recipe:
        self.calls += 1
        return Recipe(config_from_hf(CONFIG), iter(self.tensors), 1000, ("not used: x",), self.save_tokenizer)

    @staticmethod
    def save_tokenizer(folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


def get(builder: Builder) -> store.PreparedModel:
    return store.get(KEY, "toy", builder)


def assert_good(prepared: store.PreparedModel) -> None:
    assert prepared.weights.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert prepared.weights[name].dtype == tensor.dtype
        assert torch.equal(prepared.weights[name], tensor)
    assert prepared.config == config_from_hf(CONFIG)
    assert prepared.notes == ("not used: x",)
    assert (prepared.tokenizer_folder / "tokenizer.json").read_text() == "{}"


def leftovers() -> list[str]:
    return [path.name for path in home.prepared_folder().iterdir() if path != KEY.folder and path.suffix != ".lock"]


def test_prepared_once_and_mapped_afterwards(caplog):
    builder = Builder()
    assert_good(get(builder))
    assert_good(get(builder))
    assert builder.calls == 1 and leftovers() == [] and caplog.records == []


def test_tensors_are_aligned_and_share_the_map():
    weights = get(Builder()).weights
    assert all(tensor.data_ptr() % store.ALIGNMENT == 0 for tensor in weights.values())
    assert len({tensor.untyped_storage().data_ptr() for tensor in weights.values()}) == 1


def test_writing_to_a_mapped_weight_does_not_reach_the_file():
    get(Builder()).weights["odd"].zero_()
    builder = Builder()
    assert_good(get(builder))
    assert builder.calls == 0


def test_key_tells_sources_and_precisions_apart():
    assert len({PreparedKey(sha * 32, p).folder for sha in ("ab", "cd") for p in ("bf16", "fp32")}) == 4


def cut(folder: Path) -> None:
    path = folder / "weights.bin"
    path.write_bytes(path.read_bytes()[:-1])


def flip(folder: Path) -> None:
    path = folder / "weights.bin"
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)


def edit(key: str, value: object):
    def apply(folder: Path) -> None:
        path = folder / "manifest.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))

    return apply


def drop_tokenizer(folder: Path) -> None:
    (folder / "tokenizer" / "tokenizer.json").unlink()


def spoil_tokenizer(folder: Path) -> None:
    (folder / "tokenizer" / "tokenizer.json").write_text("{ }")


def empty_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut, "weights.bin has changed"),
        (flip, "weights.bin has changed"),
        (drop_tokenizer, "No such file"),
        (spoil_tokenizer, "tokenizer.json has changed"),
        (empty_manifest, "damaged"),
        (edit("made_by", "paceline 0.0.1, store 1, layout 1"), "another version of Paceline"),
        (edit("source_sha256", "cd" * 32), "another model"),
        (edit("precision", "fp32"), "another model"),
        (edit("tensors", {"x": {"dtype": "float32", "shape": [10**6], "offset": 0}}), "ends before x"),
        (edit("config", {}), "damaged"),
        (edit("files", 3), "damaged"),
    ],
)
def test_a_damaged_or_old_copy_is_made_again_and_said(damage, said, caplog):
    get(Builder())
    damage(KEY.folder)
    builder = Builder()
    with caplog.at_level(logging.WARNING):
        assert_good(get(builder))
    assert builder.calls == 1
    (notice,) = caplog.messages
    assert "toy" in notice and said in notice
    assert_good(get(builder))
    assert builder.calls == 1 and leftovers() == []


def test_no_space_is_said_before_anything_is_written(monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(home.shutil, "disk_usage", lambda path: usage(1, 1, 60_000_000))
    with pytest.raises(PacelineError, match=r"prepared weights of toy: 67\.1 MB needed, 60\.0 MB available"):
        get(Builder())
    assert leftovers() == [] and not KEY.folder.exists()


@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (OSError(28, "No space left on device"), PacelineError),
        (PacelineError("weight x is missing"), PacelineError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_a_failure_in_the_middle_leaves_nothing(error, seen):
    def tensors():
        yield "odd", TENSORS["odd"]
        raise error

    with pytest.raises(seen):
        get(Builder(tensors()))
    assert leftovers() == [] and not KEY.folder.exists()


def test_what_a_killed_process_left_is_removed():
    rest = home.prepared_folder() / f".{KEY.folder.name}.tmp"
    rest.mkdir(parents=True)
    (rest / "weights.bin").write_bytes(b"half")
    assert_good(get(Builder()))
    assert leftovers() == []


def test_concurrent_writers_prepare_once():
    """Two threads with a lock each: the lock file parts them as it parts processes."""

    def slow():
        for item in TENSORS.items():
            time.sleep(0.05)
            yield item

    builders = [Builder(slow()), Builder(slow())]
    with ThreadPoolExecutor() as pool:
        for prepared in pool.map(get, builders):
            assert_good(prepared)
    assert sum(builder.calls for builder in builders) == 1 and leftovers() == []


def test_progress_is_told_tensor_by_tensor():
    told = []
    store.get(KEY, "toy", Builder(), lambda what, done, total: told.append((what, done, total)))
    assert [event[:2] for event in told] == [("preparing toy", done) for done in (28, 88, 96, 120)]
