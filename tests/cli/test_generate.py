"""`paceline generate` from end to end, on a tiny random model."""

import io
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.cli import generation
from paceline.cli.generate import METHOD_NAMES
from paceline.cli.main import main
from paceline.decode import Step
from paceline.drafters.base import METHODS

CONTEXT = 512  # positions of the tiny model
TEXT = "one two three one two three"


@pytest.fixture
def generate(tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs `paceline generate --model TINY …` and returns (status, stdout, stderr)."""

    def run(*arguments: str, model: Path = tiny_llama_dir) -> tuple[int, str, str]:
        status = main(["generate", "--model", str(model), *arguments])
        output = capsys.readouterr()
        return status, output.out, output.err

    return run


@pytest.fixture
def as_json(generate: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """Runs it with `--json` and returns the object."""

    def run(*arguments: str, **options: Any) -> dict[str, Any]:
        status, out, err = generate("--json", *arguments, **options)
        assert status == 0, err
        assert out.count("\n") == 1
        return json.loads(out)

    return run


@pytest.fixture(scope="module")
def reference(tiny_llama_dir: Path) -> Callable[[list[int], int], list[int]]:
    """Greedy ids by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)

    def run(prompt_ids: list[int], count: int) -> list[int]:
        out = model.generate(
            torch.tensor([prompt_ids]),
            attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
        return out[0, len(prompt_ids) :].tolist()

    return run


def hf_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def test_greedy_ids_are_those_of_transformers(
    as_json: Callable[..., Any], reference: Callable[..., Any], tiny_llama_dir: Path
) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT}]
    chat_ids = hf_tokenizer(tiny_llama_dir).apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    answer = as_json(TEXT, "--system", "Be brief.", "--temperature", "0", "--max-tokens", "24", "--dtype", "fp32")
    assert answer["usage"]["prompt_tokens"] == len(chat_ids)
    assert answer["token_ids"] == reference(chat_ids, 24)


def test_raw_completes_without_the_chat_template(
    as_json: Callable[..., Any], reference: Callable[..., Any], tiny_llama_dir: Path
) -> None:
    ids = hf_tokenizer(tiny_llama_dir)(TEXT)["input_ids"]
    answer = as_json(TEXT, "--raw", "--temperature", "0", "--max-tokens", "24", "--dtype", "fp32")
    assert answer["usage"]["prompt_tokens"] == len(ids)
    assert answer["token_ids"] == reference(ids, 24)


def test_the_method_changes_nothing_but_the_passes(as_json: Callable[..., Any], tiny_llama_dir: Path) -> None:
    common = (TEXT, "--seed", "2", "--temperature", "0.8", "--max-tokens", "40")
    plain = as_json(*common, "--method", "none")
    speculation = plain["metrics"]["speculative_decoding"]
    count = plain["usage"]["completion_tokens"]
    assert plain["finish_reason"] == "length"  # or the last draft below would be cut
    assert speculation["mean_acceptance_length"] == 1
    assert speculation["num_spec_steps"] == count
    assert speculation["acceptance_histogram"] == [count]
    for options in (
        ["--method", "ngram"],
        ["--method", "suffix"],
        ["--method", "suffix,draft_model", "--draft-model", str(tiny_llama_dir)],
        ["--num-draft-tokens", "0"],
        ["--num-draft-tokens", "1"],
        ["--draft-model", str(tiny_llama_dir)],
        ["--draft-model", str(tiny_llama_dir), "--num-draft-tokens", "8"],
    ):
        answer = as_json(*common, *options)
        assert answer["token_ids"] == plain["token_ids"]
        assert answer["text"] == plain["text"]
    # The target as its own drafter: everything it drafts is accepted, so 8 drafted tokens yield 9 a pass.
    speculation = answer["metrics"]["speculative_decoding"]
    assert speculation["draft_acceptance_rate"] == 1
    assert speculation["num_spec_steps"] == -(-count // 9)


def test_the_object_holds_what_it_should(as_json: Callable[..., Any]) -> None:
    answer = as_json(TEXT, "--seed", "3", "--max-tokens", "20")
    assert list(answer) == [
        "text",
        "token_ids",
        "finish_reason",
        "usage",
        "timings",
        "exact",
        "seed",
        "metrics",
    ]
    assert list(answer["usage"]) == ["prompt_tokens", "completion_tokens", "total_tokens"]
    assert list(answer["timings"]) == ["load_s", "prefill_s", "decode_s", "tokens_per_second"]
    assert list(answer["metrics"]) == ["speculative_decoding"]
    assert list(answer["metrics"]["speculative_decoding"]) == [
        "mean_acceptance_length",
        "draft_acceptance_rate",
        "num_spec_steps",
        "num_draft_tokens",
        "num_accepted_draft_tokens",
        "acceptance_histogram",
    ]
    usage, speculation = answer["usage"], answer["metrics"]["speculative_decoding"]
    assert usage["completion_tokens"] == len(answer["token_ids"])
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    histogram = speculation["acceptance_histogram"]
    assert sum(histogram) == speculation["num_spec_steps"]
    assert sum(k * passes for k, passes in enumerate(histogram)) == speculation["num_accepted_draft_tokens"]
    assert answer["exact"] in ("bitwise", "up to ties")
    assert answer["seed"] == 3
    assert all(seconds > 0 for seconds in answer["timings"].values())


def test_the_stream_is_the_text(generate: Callable[..., Any], as_json: Callable[..., Any]) -> None:
    common = (TEXT, "--seed", "3", "--max-tokens", "30")
    status, out, err = generate(*common)
    assert status == 0
    assert out == as_json(*common)["text"] + "\n"
    assert "exact: " in err and "seed: 3" in err


def test_a_seed_is_drawn_and_shown(as_json: Callable[..., Any], generate: Callable[..., Any]) -> None:
    first, second = (as_json(TEXT, "--max-tokens", "30") for _ in range(2))
    assert first["seed"] != second["seed"]
    assert first["token_ids"] != second["token_ids"]  # thirty tokens at T = 1 from a random model
    again = as_json(TEXT, "--max-tokens", "30", "--seed", str(first["seed"]))
    assert again["token_ids"] == first["token_ids"]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_max_tokens(count: int, as_json: Callable[..., Any], tiny_llama_dir: Path) -> None:
    """Cut inside an accepted run, too: its drafts are all accepted."""
    common = (TEXT, "--temperature", "0", "--draft-model", str(tiny_llama_dir))
    answer = as_json(*common, "--max-tokens", str(count))
    assert answer["token_ids"] == as_json(*common, "--max-tokens", "20")["token_ids"][:count]
    assert answer["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == count


def test_the_answer_ends_with_the_context(as_json: Callable[..., Any], tiny_llama_dir: Path) -> None:
    length = as_json("a", "--raw", "--max-tokens", "1")["usage"]["prompt_tokens"]
    for method in (["--method", "none"], ["--draft-model", str(tiny_llama_dir)]):
        answer = as_json("a", "--raw", "--max-context", "40", "--seed", "1", *method)
        assert answer["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 40 - length


def test_a_stop_string_cuts_text_ids_and_statistics(as_json: Callable[..., Any], tiny_llama_dir: Path) -> None:
    common = (TEXT, "--raw", "--seed", "5", "--top-k", "40")
    whole = as_json(*common, "--max-tokens", "40", "--method", "none")
    at = next(i for i in range(4, 30) if whole["text"][i : i + 2].isascii() and whole["text"][i : i + 2].isprintable())
    stop = whole["text"][at : at + 2]
    expected = whole["text"][: whole["text"].index(stop)]
    answers = [
        as_json(*common, "--max-tokens", "40", "--stop", "\0 never", "--stop", stop, *method)
        for method in (["--method", "none"], ["--draft-model", str(tiny_llama_dir), "-k", "8"])
    ]
    for answer in answers:
        assert answer["text"] == expected
        assert answer["finish_reason"] == "stop"
        assert answer["token_ids"] == whole["token_ids"][: len(answer["token_ids"])]
        assert hf_tokenizer(tiny_llama_dir).decode(answer["token_ids"]) == expected + stop
        speculation = answer["metrics"]["speculative_decoding"]
        length = speculation["mean_acceptance_length"] * speculation["num_spec_steps"]
        assert length == pytest.approx(len(answer["token_ids"]))
    assert answers[0]["token_ids"] == answers[1]["token_ids"]


def test_statistics(generate: Callable[..., Any], tiny_llama_dir: Path) -> None:
    _, out, err = generate(
        TEXT,
        "--temperature",
        "0",
        "--max-tokens",
        "10",
        "--draft-model",
        str(tiny_llama_dir),
        "-k",
        "4",
        "--stats",
    )
    # Passes of 5 and 5 tokens: 4 of 4 and 4 of 4 accepted.
    line = err.splitlines()[-1]
    assert "10 tokens ·" in line and "tokens/s" in line
    assert "acceptance length 5.00 · acceptance rate 100 % (8 of 8) · 2 passes · length" in line
    assert "tokens/s" not in out


def test_the_prompt_may_come_from_a_file_or_a_pipe(
    as_json: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ("--temperature", "0", "--max-tokens", "12")
    expected = as_json("çà, 😀", *common)
    file = tmp_path / "prompt.txt"
    file.write_bytes("çà, 😀\n".encode())
    runs = [as_json("--file", str(file), *common)]
    for arguments in ([], ["-"]):
        monkeypatch.setattr(sys, "stdin", io.StringIO("çà, 😀\n"))
        runs.append(as_json(*arguments, *common))
    for answer in runs:
        assert (answer["text"], answer["usage"]) == (expected["text"], expected["usage"])


@pytest.mark.parametrize("options", [[], ["--json"], ["--stats"]])
def test_ctrl_c_keeps_the_text_so_far(
    options: list[str], generate: Callable[..., Any], tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = hf_tokenizer(tiny_llama_dir)("one twoé")["input_ids"][:-1]  # half of the é has come

    def interrupted(*args: Any, **kwargs: Any) -> Iterator[Step]:
        yield Step(tuple(ids[:4]), 0, 0, None)
        yield Step(tuple(ids[4:]), 3, 3, None)
        raise KeyboardInterrupt

    monkeypatch.setattr(generation, "decode", interrupted)
    status, out, err = generate(TEXT, *options)
    assert status == 130
    assert err.splitlines()[-1] == "interrupted after 8 tokens"
    if options == ["--json"]:
        answer = json.loads(out)
        assert answer["finish_reason"] == "interrupted"
        assert answer["text"] == "one two\ufffd"
        assert answer["usage"]["completion_tokens"] == 8
        assert answer["metrics"]["speculative_decoding"]["num_spec_steps"] == 2
    else:
        assert out == "one two\ufffd\n"
    if options == ["--stats"]:
        assert "2 passes · interrupted" in err.splitlines()[-2]


def test_the_help_names_every_method() -> None:
    """The command line must not import the registry, which needs torch, to name its methods."""
    assert set(METHOD_NAMES) == set(METHODS) - {"composite"}


BAD = [
    (["", "--raw"], "the prompt is empty"),
    (["  \n"], "the prompt is empty"),
    ([TEXT, "--max-tokens", "0"], "max_tokens is 0"),
    ([TEXT, "--max-tokens", "-3"], "max_tokens is -3"),
    ([TEXT, "--num-draft-tokens", "-1"], "--num-draft-tokens is -1"),
    ([TEXT, "--num-draft-tokens", "129"], "--num-draft-tokens is 129"),
    ([TEXT, "--temperature", "-1"], "temperature is -1"),
    ([TEXT, "--temperature", "nan"], "temperature is nan"),
    ([TEXT, "--top-p", "0"], "top_p is 0"),
    ([TEXT, "--top-p", "1.5"], "top_p is 1.5"),
    ([TEXT, "--top-k", "-2"], "top_k is -2"),
    ([TEXT, "--min-p", "2"], "min_p is 2"),
    ([TEXT, "--seed", "-1"], "seed is -1"),
    ([TEXT, "--stop", ""], "stop"),
    ([TEXT, "--method", "ngrm"], "unknown method 'ngrm'"),
    ([TEXT, "--method", "suffix,ngrm"], "unknown method 'ngrm'"),
    ([TEXT, "--method", "suffix,none"], "none"),
    ([TEXT, "--method", "suffix", "--draft-model", "smollm2-135m"], "contradicts --method suffix"),
    ([TEXT, "--method", "draft_model"], "needs a draft model"),
    ([TEXT, "--method", "ngram", "--draft-model", "smollm2-135m"], "contradicts --method ngram"),
    ([TEXT, "--method", "none", "--num-draft-tokens", "3"], "contradicts --method none"),
    ([TEXT, "--raw", "--system", "x"], "--system contradicts --raw"),
    ([TEXT, "--file", "prompt.txt"], "two prompts"),
    (["--file", "no-such-file.txt"], "no-such-file.txt"),
    ([TEXT, "--threads", "0"], "--threads is 0"),
    ([TEXT, "--dtype", "int3"], "int3"),
    ([TEXT, "--device", "abacus"], "abacus"),
    ([TEXT, "--max-context", "100000"], f"{CONTEXT}"),
    ([TEXT, "--max-context", "0"], "0"),
    ([TEXT * 30, "--max-context", "64"], "64"),
    ([TEXT * 30], f"{CONTEXT}"),
    ([TEXT, "--draft-model", "no/such/folder"], "no/such/folder"),
    (["\udcff"], "not UTF-8"),
]


@pytest.mark.parametrize(("arguments", "culprit"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_bad_input_is_one_line_and_nothing_else(
    arguments: list[str], culprit: str, generate: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_pass(*args: Any, **kwargs: Any) -> None:
        pytest.fail("something was generated")

    monkeypatch.setattr("paceline.models.decoder.Decoder.logits", no_pass)
    status, out, err = generate(*arguments)
    assert status == 1
    assert out == ""
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and culprit in errors[0]
    assert "Traceback" not in err


def test_a_prompt_beyond_the_context_gives_both_numbers(generate: Callable[..., Any]) -> None:
    _, _, err = generate("a" * 600, "--raw")
    (error,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert "600" in error and f"{CONTEXT}" in error


def test_stdin_without_a_prompt(generate: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    for stdin, message in ((None, "there is no prompt"), (io.StringIO(""), "the prompt is empty")):
        monkeypatch.setattr(sys, "stdin", stdin)
        status, _, err = generate()
        assert status == 1 and message in err


def test_a_model_without_a_chat_template_can_only_complete(
    generate: Callable[..., Any], as_json: Callable[..., Any], tiny_llama_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "no-template"
    shutil.copytree(tiny_llama_dir, folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    status, out, err = generate(TEXT, model=folder)
    assert (status, out) == (1, "")
    assert "no chat template" in err and "--raw" in err
    assert as_json(TEXT, "--raw", "--max-tokens", "3", model=folder)["usage"]["completion_tokens"] <= 3


def test_a_prompt_longer_than_one_prefill_pass(
    as_json: Callable[..., Any], reference: Callable[..., Any], tiny_llama_dir: Path
) -> None:
    prompt = "".join(chr(97 + i * i % 26) for i in range(300))
    answer = as_json(prompt, "--raw", "--temperature", "0", "--max-tokens", "16", "--dtype", "fp32")
    assert answer["token_ids"] == reference(hf_tokenizer(tiny_llama_dir)(prompt)["input_ids"], 16)
