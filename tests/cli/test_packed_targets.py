"""Targets whose matrices stay packed, as a GGUF file's do by default: a command works, or says what to do."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from drafters import head_files

from paceline.cli.main import main
from paceline.drafters import draft_model
from paceline.models.head_matrices import HeadMatrices
from paceline.models.load import load_model

PACKED = ("file", "int8")
TEXT = "one two three one two three"


@pytest.fixture(scope="module")
def heads(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Random heads for the tiny model, which share its output, its embeddings or both."""
    folder = tmp_path_factory.mktemp("heads")
    decoder = load_model(str(tiny_llama_dir), dtype="fp32").decoder
    embedding, output = decoder.embedding, decoder.head.weight
    made = {
        "medusa": head_files.medusa(output, "original", own_output=False),
        "eagle": head_files.eagle(embedding, output, own_embedding=False),
        "eagle3": head_files.eagle3_native(embedding, 4, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}),
    }
    return {name: str(head.write(folder / name)) for name, head in made.items()}


@pytest.fixture
def run(tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a command on the tiny model: (status, stdout, stderr)."""

    def run(*words: str) -> tuple[int, str, str]:
        status = main([*words, "--model", str(tiny_llama_dir)])
        output = capsys.readouterr()
        return status, output.out, output.err

    return run


@pytest.mark.parametrize("dtype", PACKED)
@pytest.mark.parametrize(
    "method", ["layer_skip", "early_exit", "lookahead", "token_recycling", "medusa", "eagle", "eagle3"]
)
def test_every_method_drafts(
    method: str, dtype: str, run: Callable[..., tuple[int, str, str]], heads: dict[str, str]
) -> None:
    common = ("generate", TEXT, "--json", "-n", "12", "--ignore-eos", "--dtype", dtype, "--method")
    status, plain, err = run(*common, "none")
    assert status == 0, err
    status, drafted, err = run(*common, method, *(("--draft-model", heads[method]) if method in heads else ()))
    assert status == 0, err
    assert json.loads(drafted)["text"] == json.loads(plain)["text"]
    assert "without speculation" not in err


@pytest.mark.parametrize("method", ["medusa", "eagle", "eagle3", "draft_model", "suffix,eagle3", "auto"])
def test_a_drafters_own_precision(
    method: str,
    run: Callable[..., tuple[int, str, str]],
    heads: dict[str, str],
    tiny_llama_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It reaches the drafter that takes it, whoever else drafts, and changes no token."""
    asked = []
    of, load = HeadMatrices.of, draft_model.load_model
    monkeypatch.setattr(HeadMatrices, "of", lambda target, dtype=None: asked.append(dtype) or of(target, dtype))
    monkeypatch.setattr(
        draft_model, "load_model", lambda name, dtype, **more: asked.append(dtype) or load(name, dtype, **more)
    )
    common = ("generate", TEXT, "--json", "-n", "12", "--ignore-eos", "--dtype", "int8", "--method")
    status, plain, err = run(*common, "none")
    assert status == 0, err
    name = str(tiny_llama_dir) if method == "draft_model" else heads.get(method, heads["eagle3"])
    status, drafted, err = run(*common, method, "--draft-model", name, "--draft-dtype", "int4")
    assert status == 0, err
    assert json.loads(drafted)["text"] == json.loads(plain)["text"]
    assert asked == ["int4"] and "without speculation" not in err


@pytest.mark.parametrize("dtype", PACKED)
@pytest.mark.parametrize("what", ["layer-skip", "medusa", "eagle3"])
def test_tuning(
    what: str, dtype: str, run: Callable[..., tuple[int, str, str]], heads: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "prompts").write_text("hello there\n")
    kind = (
        ("tree", "--method", what, "--head", heads[what], "--depth", "2") if what in heads else (what, "--trials", "2")
    )
    where = ("--prompts", str(tmp_path / "prompts"), "--log", str(tmp_path / "log"))
    status, out, err = run("tune", *kind, *where, "-n", "8", "-k", "3", "--dtype", dtype)
    assert status == 0, err
    assert json.loads(out)["num_speculative_tokens"] == 3


@pytest.mark.parametrize("dtype", PACKED)
def test_an_engine_that_needs_numbers_says_so(
    dtype: str, run: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["hello there"]}\n')
    common = ("bench", "--peer", "transformers", "--methods", "ngram", "--prompts", str(tmp_path / "prompts.jsonl"))
    status, out, err = run(*common, "--raw", "-n", "4", "--dtype", dtype)
    assert status == 0, err
    (line,) = [line for line in err.splitlines() if "transformers" in line and "packed" in line]
    assert "as numbers" in line and "--dtype bf16" in line and "Error" not in line
    assert "--dtype bf16" in json.dumps(json.loads(out.splitlines()[-1])["left_out"])
