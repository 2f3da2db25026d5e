"""Hub ids, and the Hub's ways to fail: `huggingface_hub` is made to raise what it raises there."""

import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants, errors

from paceline.errors import PacelineError
from paceline.models.hub import PATTERNS, HubId


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        ("Qwen/Qwen2.5-0.5B", HubId("Qwen/Qwen2.5-0.5B")),
        ("Qwen/Qwen2.5-0.5B@main", HubId("Qwen/Qwen2.5-0.5B", "main")),
        ("o/n@refs/pr/3", HubId("o/n", "refs/pr/3")),
        ("o/n-GGUF:n.Q4_K_M.gguf", HubId("o/n-GGUF", None, "n.Q4_K_M.gguf")),
        ("o/n-GGUF@abc:sub/n.gguf", HubId("o/n-GGUF", "abc", "sub/n.gguf")),
        ("o/n-GGUF:n.gguf@abc", HubId("o/n-GGUF", "abc", "n.gguf")),
        ("smollm2-135m", None),
        ("a/b/c", None),
        ("o/n@a:n.gguf@b", None),
        ("o/n:file.bin", None),
        ("./o/n", None),
        ("", None),
    ],
)
def test_forms(name, parsed):
    assert HubId.parse(name) == parsed


def raising(error: Exception):
    def download(*args, **kwargs):
        raise error

    return download


def http_error(kind: type[Exception]) -> Exception:
    """An error as the Hub's answer makes it, without the answer."""
    return kind.__new__(kind, "404")


@pytest.mark.parametrize(
    ("error", "message", "hint"),
    [
        (
            http_error(errors.GatedRepoError),
            "o/n: access to this repository is restricted",
            "huggingface.co/o/n",
        ),
        (http_error(errors.RepositoryNotFoundError), "o/n: no such repository", "HF_TOKEN"),
        (http_error(errors.RevisionNotFoundError), "no revision 'rev'", None),
        (http_error(errors.RemoteEntryNotFoundError), "no such file", None),
        (errors.LocalEntryNotFoundError("…"), "cannot reach the Hugging Face Hub for o/n", "network"),
        (errors.HFValidationError("…"), "not a valid Hub id", None),
        (OSError(28, "No space left on device"), "download failed: .*No space left", "again"),
        (RuntimeError("broken pipe\nmore"), "download failed: broken pipe$", "again"),
    ],
)
@pytest.mark.parametrize("name", ["o/n@rev", "o/n@rev:f.gguf"])
def test_each_failure_is_one_line_that_says_what_to_do(monkeypatch, name, error, message, hint):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.snapshot_download", raising(error))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", raising(error))
    with pytest.raises(PacelineError, match=message.replace("o/n:", f"{name}:")) as caught:
        HubId.parse(name).fetch()
    assert "\n" not in str(caught.value)
    assert hint is None or hint in caught.value.hint


def test_revision_and_patterns_reach_the_library(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    asked = {}
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download",
        lambda repo, **kwargs: asked.update(repo=repo, **kwargs) or str(tmp_path),
    )
    assert HubId("o/n", "abc").fetch() == tmp_path
    assert asked == {"repo": "o/n", "revision": "abc", "allow_patterns": list(PATTERNS)}


def test_a_repository_of_gguf_files_only(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda repo, **kwargs: str(tmp_path))
    with pytest.raises(PacelineError, match="o/n: the repository has no safetensors model") as caught:
        HubId("o/n").fetch()
    assert caught.value.hint == "for a GGUF repository name the file: o/n:FILE.gguf"


@pytest.mark.parametrize(("name", "code"), [("o/n", 0), ("o/absent", 1)])
def test_offline_mode_uses_the_cache_and_says_when_it_cannot(tmp_path, name, code):
    """In a process of its own: the library reads its settings when it is imported."""
    snapshot = tmp_path / "models--o--n" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("abc")
    code_text = f"from paceline.cli.main import main; raise SystemExit(main(['pull', {name!r}]))"
    environment = {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(_SOURCE)}
    done = subprocess.run([sys.executable, "-c", code_text], env=environment, capture_output=True, text=True)
    assert done.returncode == code
    if code == 0:
        assert Path(done.stdout.strip()) == snapshot
    else:
        assert done.stderr.splitlines() == [
            "error: o/absent is not in the local Hub cache, and HF_HUB_OFFLINE is set",
            "hint: unset HF_HUB_OFFLINE to download it",
        ]


_SOURCE = Path(__file__).parents[2] / "src"
