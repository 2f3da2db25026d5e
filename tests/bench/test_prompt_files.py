"""Prompts from a file, and those that ship with the package."""

from pathlib import Path

import pytest

from paceline.bench.prompts import Conversation, read_prompts
from paceline.errors import PacelineError


def test_the_shipped_set_has_six_categories_of_four() -> None:
    found = read_prompts(None)
    assert found.categories == dict.fromkeys(("chat", "code", "maths", "summarise", "translate", "copy-edit"), 4)
    assert found.source == "shipped"
    assert len({conversation.id for conversation in found.conversations}) == 24
    assert any(len(conversation.turns) > 1 for conversation in found.conversations)


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"id": "x/1", "category": "chat", "turns": ["one", "two"], "more": 3}\n\n{"prompt": "three"}\n'
        '{"category": "chat", "turns": ["four"]}\n'
    )
    found = read_prompts(str(path))
    assert found.conversations == (
        Conversation("x/1", "chat", ("one", "two")),
        Conversation("3", "prompts", ("three",)),
        Conversation("4", "chat", ("four",)),
    )
    limited = read_prompts(str(path), limit=1)
    assert limited.conversations == found.conversations[:2]
    assert limited.sha256 != found.sha256


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: no prompt in it"),
        ("[1]", "line 2: no prompt in it"),
        ('{"text": "x"}', "line 2: no prompt in it"),
        ('{"turns": []}', "line 2: turns is"),
        ('{"turns": "hello"}', "line 2: turns is"),
        ('{"turns": ["a", 3]}', "line 2: turns is"),
        ('{"turns": [""]}', "line 2: turns is"),
        ('{"prompt": null}', "line 2: turns is"),
        ('{"prompt": "x", "category": 3}', "line 2: category is 3"),
    ],
)
def test_a_bad_line_is_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "good"}}\n{line}\n')
    with pytest.raises(PacelineError, match=message) as error:
        read_prompts(str(path))
    assert error.value.hint


def test_bad_files(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "latin").write_bytes(b'{"prompt": "caf\xe9"}\n')
    for name, message in (("empty", "holds no prompts"), ("latin", "not UTF-8"), ("none", "No such file"), ("", "dir")):
        with pytest.raises(PacelineError, match=message):
            read_prompts(str(tmp_path / name))
