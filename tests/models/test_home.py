"""File habits under `PACELINE_HOME`: failures are a user's errors, and leave nothing half done."""

from pathlib import Path

import pytest

from paceline.errors import PacelineError
from paceline.models.home import forget_hash, write_json
from paceline.models.inventory import delete_folder


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))


def refuse(*args, **kwargs):
    raise PermissionError(13, "Permission denied", str(args[0]))


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    write_json(path, [1])
    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(PermissionError):
        write_json(path, [2])
    monkeypatch.undo()
    with pytest.raises(TypeError):
        write_json(path, [object()])
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.json"] and path.read_text() == "[\n 1\n]\n"


def test_what_may_not_be_deleted_is_named_in_one_line(tmp_path, monkeypatch):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "weights").write_text("w")
    monkeypatch.setattr("shutil.rmtree", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)  # of what is remembered of its files
    with pytest.raises(PacelineError, match=r"cannot delete .*/m: Permission denied") as caught:
        delete_folder(tmp_path / "m")
    assert "right to write" in caught.value.hint
    forget_hash(tmp_path / "m" / "weights")
