"""Where a head's tensors lie: single files, shards, pickles, the Hub; what is damaged or ambiguous is named."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from paceline.errors import PacelineError
from paceline.models.head_files import open_head
from paceline.models.hub import HEAD_PATTERNS

ONE, TWO = {"a": torch.ones(2)}, {"b": torch.zeros(3)}


def folder(path: Path, config: str = "{}") -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(config)
    return path


def names(path: Path) -> list[str]:
    return sorted(open_head(str(path)).tensors)


def test_files_and_shards(tmp_path: Path) -> None:
    place = folder(tmp_path)
    torch.save(ONE, place / "pytorch_model.bin")
    torch.save(TWO, place / "training_args.bin")
    assert names(place) == ["a"]
    save_file(TWO, place / "model-00001-of-00002.safetensors")
    save_file({"c": torch.ones(1)}, place / "model-00002-of-00002.safetensors")
    assert names(place) == ["b", "c"]  # safetensors go before pickles
    index = {"weight_map": {"b": "model-00001-of-00002.safetensors"}}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    assert names(place) == ["b"]


@pytest.mark.parametrize("prefix", ["model.", "medusa_head.", "medusa_heads."])
def test_the_modules_name_is_taken_off(prefix: str, tmp_path: Path) -> None:
    save_file({f"{prefix}x": torch.ones(1), f"{prefix}y": torch.ones(1)}, folder(tmp_path) / "model.safetensors")
    assert names(tmp_path) == ["x", "y"]


def test_a_hub_id_fetches_weights_of_every_kind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch.save(ONE, folder(tmp_path) / "medusa_lm_head.pt")
    asked: dict[str, object] = {}
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda repo, **kwargs: asked.update(repo=repo, **kwargs) or str(tmp_path)
    )
    assert sorted(open_head("owner/head@v1").tensors) == ["a"]
    assert asked == {"repo": "owner/head", "revision": "v1", "allow_patterns": list(HEAD_PATTERNS)}


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    def refused(place: Path | str) -> str:
        with pytest.raises(PacelineError) as error:
            open_head(str(place))
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "no draft head './nowhere'" in refused("./nowhere")
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in refused(tmp_path / "empty")
    assert "cannot be read as JSON" in refused(folder(tmp_path / "cut", config='{"a":'))
    assert "has no weights" in refused(folder(tmp_path / "bare"))

    two = folder(tmp_path / "two")
    torch.save(ONE, two / "first.pt")
    torch.save(TWO, two / "second.bin")
    assert "holds first.pt and second.bin: which are the weights?" in refused(two)

    twice = folder(tmp_path / "twice")
    save_file(ONE, twice / "x.safetensors")
    save_file(ONE, twice / "y.safetensors")
    assert "holds tensor a twice, the second time in y.safetensors" in refused(twice)

    damaged = folder(tmp_path / "damaged")
    save_file(ONE, damaged / "model.safetensors")
    (damaged / "model.safetensors").write_bytes((damaged / "model.safetensors").read_bytes()[:-3])
    assert "model.safetensors cannot be read" in refused(damaged)

    cut = folder(tmp_path / "cut_pickle")
    torch.save(ONE, cut / "pytorch_model.bin")
    (cut / "pytorch_model.bin").write_bytes((cut / "pytorch_model.bin").read_bytes()[:100])
    assert "pytorch_model.bin cannot be read" in refused(cut)

    nested = folder(tmp_path / "nested")
    torch.save({"draft_state_dict": ONE}, nested / "training_state.pt")
    assert "does not hold tensors by name" in refused(nested)

    index = folder(tmp_path / "index")
    (index / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    assert "gone.safetensors cannot be read" in refused(index)

    for number, text in enumerate(("{", "[1]", '{"weight_map": ["a"]}', '{"weight_map": {}}')):
        strange = folder(tmp_path / f"index{number}")
        (strange / "model.safetensors.index.json").write_text(text)
        assert "model.safetensors.index.json" in refused(strange)

    pointer = folder(tmp_path / "pointer")
    (pointer / "pytorch_model.bin").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "pytorch_model.bin cannot be read: torch.save has not written it" in refused(pointer)

    empty = folder(tmp_path / "empty_pickle")
    (empty / "pytorch_model.bin").write_bytes(b"")
    assert "pytorch_model.bin cannot be read" in refused(empty)

    numbered = folder(tmp_path / "numbered")
    torch.save({0: torch.ones(1)}, numbered / "pytorch_model.bin")
    assert "does not hold tensors by name" in refused(numbered)


@pytest.mark.parametrize("archive", [True, False])
def test_pickles_of_old_and_new_are_read(archive: bool, tmp_path: Path) -> None:
    torch.save(ONE, folder(tmp_path) / "pytorch_model.bin", _use_new_zipfile_serialization=archive)
    assert names(tmp_path) == ["a"]
