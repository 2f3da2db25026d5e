"""`paceline generate` from end to end, on a tiny random model."""

import io
import json
import logging
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.cli.main import main
from paceline.engine.engine import Engine
from paceline.models import load

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
        [],
        ["--draft-model", str(tiny_llama_dir)],
        [
            "--method",
            "draft_model",
            "--draft-model",
            str(tiny_llama_dir),
            "--num-draft-tokens",
            "8",
            "--draft-confidence-threshold",
            "0",
        ],
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
        "lossless",
        "seed",
        "metrics",
    ]
    assert list(answer["usage"]) == ["prompt_tokens", "completion_tokens", "total_tokens"]
    assert list(answer["timings"]) == ["load_s", "prefill_s", "decode_s", "tokens_per_second"]
    assert list(answer["metrics"]) == ["speculative_decoding", "auto"]
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
    first, second = (as_json(TEXT, "--temperature", "1", "--max-tokens", "30") for _ in range(2))
    assert first["seed"] != second["seed"]
    assert first["token_ids"] != second["token_ids"]  # thirty tokens at T = 1 from a random model
    again = as_json(TEXT, "--temperature", "1", "--max-tokens", "30", "--seed", str(first["seed"]))
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
        "--method",
        "draft_model",
        "--draft-model",
        str(tiny_llama_dir),
        "--draft-confidence-threshold",
        "0",
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


def interrupt_after(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the engine makes its step of that number."""
    inner, count = Engine.step, 0

    def step(self: Engine) -> Any:
        nonlocal count
        count += 1
        if count == steps:
            signal.raise_signal(signal.SIGINT)
        return inner(self)

    monkeypatch.setattr(Engine, "step", step)


@pytest.fixture
def ctrl_c_works() -> Any:
    """A shell starts background jobs with the signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("options", [[], ["--json"], ["--stats"]])
def test_ctrl_c_keeps_the_text_so_far(
    options: list[str],
    generate: Callable[..., Any],
    as_json: Callable[..., Any],
    ctrl_c_works: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    common = (TEXT, "--method", "none", "--seed", "4")
    expected = as_json(*common, "--max-tokens", "8")
    interrupt_after(9, monkeypatch)  # one for the prompt, eight tokens
    status, out, err = generate(*common, *options)
    assert status == 130
    assert err.splitlines()[-1] == "interrupted after 8 tokens"
    if options == ["--json"]:
        answer = json.loads(out)
        assert answer["finish_reason"] == "interrupted"
        assert answer["token_ids"] == expected["token_ids"]
        assert answer["text"] == expected["text"]
        assert answer["usage"]["completion_tokens"] == 8
        assert answer["metrics"]["speculative_decoding"]["num_spec_steps"] == 8
    else:
        assert out == expected["text"] + "\n"
    if options == ["--stats"]:
        assert "8 passes · interrupted" in err.splitlines()[-2]


def test_ctrl_c_in_the_prompt_is_no_decoding_time(
    generate: Callable[..., Any], ctrl_c_works: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_after(1, monkeypatch)
    status, out, _ = generate("a" * 300, "--raw", "--json")
    timings = json.loads(out)["timings"]
    assert status == 130
    assert timings["prefill_s"] > 0
    assert timings["decode_s"] == timings["tokens_per_second"] == 0


def test_a_second_ctrl_c_does_not_wait(
    generate: Callable[..., Any], ctrl_c_works: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(self: Engine) -> Any:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("it waited for the pass")

    monkeypatch.setattr(Engine, "step", step)
    status, out, err = generate(TEXT)
    assert (status, out) == (130, "")
    assert err.splitlines()[-1] == "interrupted"


def test_plain_decoding_has_no_statistics_of_speculation(generate: Callable[..., Any]) -> None:
    for options in (["--method", "none"], ["--num-draft-tokens", "0"]):
        _, _, err = generate(TEXT, "--max-tokens", "1", "--ignore-eos", "--stats", *options)
        banner, line = err.splitlines()[-2:]
        assert line.startswith("1 token · ") and line.endswith(" tokens/s · 1 pass · length")
        assert "accept" not in line and "draft" not in line
        assert "method: none" in banner
        assert "cpu (1 thread)" in banner


def test_nothing_drafted_is_said(generate: Callable[..., Any]) -> None:
    _, _, err = generate("a", "--raw", "--max-tokens", "1", "--method", "ngram", "--stats")
    assert "nothing drafted" in err.splitlines()[-1]


def test_greedy_unless_something_asks_for_sampling(as_json: Callable[..., Any], generate: Callable[..., Any]) -> None:
    greedy = as_json(TEXT, "--max-tokens", "20", "--temperature", "0")
    assert as_json(TEXT, "--max-tokens", "20")["token_ids"] == greedy["token_ids"]
    assert "· greedy" in generate(TEXT, "--max-tokens", "1")[2]
    sampled = as_json(TEXT, "--max-tokens", "20", "--temperature", "1", "--seed", "6")
    assert as_json(TEXT, "--max-tokens", "20", "--seed", "6")["token_ids"] == sampled["token_ids"]
    assert sampled["token_ids"] != greedy["token_ids"]
    assert "temperature 1 · seed: " in generate(TEXT, "--max-tokens", "1", "--top-p", "0.9")[2]


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_a_rule_is_used(rule: str, as_json: Callable[..., Any], tiny_llama_dir: Path) -> None:
    """The target as its own drafter, sampled with chance of its own: all is accepted, and other tokens come out."""
    common = (TEXT, "--seed", "8", "--max-tokens", "24", "--ignore-eos", "--method", "draft_model")
    common += ("--draft-model", str(tiny_llama_dir))
    answer, coupled = as_json(*common, "--rule", rule), as_json(*common, "--rule", "coupled")
    assert coupled["token_ids"] == as_json(*common)["token_ids"]
    assert answer["token_ids"] != coupled["token_ids"]
    assert answer["metrics"]["speculative_decoding"]["draft_acceptance_rate"] == 1


def test_the_lossy_rule_is_named_as_such(
    as_json: Callable[..., Any], generate: Callable[..., tuple[int, str, str]], tiny_llama_dir: Path
) -> None:
    """It is in use where it is named, with the word, and says on every output that it is not lossless."""
    common = (TEXT, "--seed", "8", "--max-tokens", "24", "--ignore-eos", "--method", "draft_model")
    common += ("--draft-model", str(tiny_llama_dir))
    answer, coupled = as_json(*common, "--rule", "lossy-typical"), as_json(*common)
    assert answer["token_ids"] != coupled["token_ids"]
    assert coupled["lossless"] and not answer["lossless"]
    assert "NOT LOSSLESS: rule typical" in generate(*common, "--rule", "lossy-typical")[2]
    assert "LOSSLESS" not in generate(*common, "--rule", "standard")[2]
    assert "--rule lossy-typical" in generate(*common, "--rule", "typical")[2]


def test_penalties_reach_the_request(as_json: Callable[..., Any]) -> None:
    common = (TEXT, "--max-tokens", "24", "--ignore-eos")
    plain = as_json(*common)["token_ids"]
    for option in ("--presence-penalty", "--frequency-penalty", "--repetition-penalty"):
        assert as_json(*common, option, "2")["token_ids"] != plain, option


def test_min_tokens_and_ignore_eos(as_json: Callable[..., Any]) -> None:
    """A seed whose answer ends of itself: found, not assumed."""
    common = ("--raw", TEXT, "--max-tokens", "40", "--method", "none")
    for seed in range(200):
        short = as_json(*common, "--seed", str(seed))
        if short["finish_reason"] == "stop":
            break
    else:
        pytest.fail("no answer ended of itself")
    count = short["usage"]["completion_tokens"]
    longer = as_json(*common, "--seed", str(seed), "--min-tokens", str(count))
    assert longer["usage"]["completion_tokens"] > count
    assert longer["token_ids"][: count - 1] == short["token_ids"][:-1]
    assert as_json(*common, "--seed", str(seed), "--ignore-eos")["finish_reason"] == "length"


def test_logprobs_are_those_of_transformers(as_json: Callable[..., Any], tiny_llama_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    answer = as_json(TEXT, "--raw", "--max-tokens", "6", "--dtype", "fp32", "--logprobs", "3", "--ignore-eos")
    prompt = hf_tokenizer(tiny_llama_dir)(TEXT)["input_ids"]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)(
            torch.tensor([[*prompt, *answer["token_ids"]]])
        ).logits[0, len(prompt) - 1 : -1]
    expected = logits.double().log_softmax(-1)
    assert len(answer["logprobs"]) == 6
    for row, position, token in zip(expected, answer["logprobs"], answer["token_ids"], strict=True):
        assert position["token_id"] == token
        assert position["token"] == hf_tokenizer(tiny_llama_dir).decode([token])
        assert position["logprob"] == pytest.approx(float(row[token]), abs=1e-4)
        assert [top["token_id"] for top in position["top"]] == row.topk(3).indices.tolist()
        assert [top["rank"] for top in position["top"]] == [1, 2, 3]


def test_a_notice_goes_to_stderr(generate: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    inner = load.resolve

    def noticing(*args: Any) -> Any:
        logging.getLogger("paceline.models.store").warning("prepared weights of %s are damaged", "x")
        return inner(*args)

    monkeypatch.setattr(load, "resolve", noticing)
    out, err = generate(TEXT, "--max-tokens", "1")[1:]
    assert "warning: prepared weights of x are damaged\n" in err and "damaged" not in out


BAD = [
    (["", "--raw"], "the prompt is empty"),
    (["  \n"], "the prompt is empty"),
    ([TEXT, "--max-tokens", "0"], "--max-tokens is 0"),
    ([TEXT, "--max-tokens", "-3"], "--max-tokens is -3"),
    ([TEXT, "--min-tokens", "-1"], "--min-tokens is -1"),
    ([TEXT, "--min-tokens", "300"], "--min-tokens is 300 but --max-tokens is 256"),
    ([TEXT, "--num-draft-tokens", "-1"], "--num-draft-tokens is -1"),
    ([TEXT, "--num-draft-tokens", "129"], "--num-draft-tokens is 129"),
    ([TEXT, "--temperature", "-1"], "--temperature is -1"),
    ([TEXT, "--temperature", "nan"], "--temperature is nan"),
    ([TEXT, "--top-p", "0"], "--top-p is 0"),
    ([TEXT, "--top-p", "1.5"], "--top-p is 1.5"),
    ([TEXT, "--top-k", "-2"], "--top-k is -2"),
    ([TEXT, "--min-p", "2"], "--min-p is 2"),
    ([TEXT, "--temperature", "0", "--top-p", "0.9"], "--top-p 0.9 contradicts --temperature 0"),
    ([TEXT, "--temperature", "0", "--min-p", "0.1"], "--min-p 0.1 contradicts --temperature 0"),
    ([TEXT, "--presence-penalty", "3"], "--presence-penalty is 3"),
    ([TEXT, "--frequency-penalty", "-3"], "--frequency-penalty is -3"),
    ([TEXT, "--repetition-penalty", "0"], "--repetition-penalty is 0"),
    ([TEXT, "--seed", "-1"], "--seed is -1"),
    ([TEXT, "--stop", ""], "--stop holds ''"),
    ([TEXT, "--logprobs", "3"], "--logprobs 3 needs --json"),
    ([TEXT, "--logprobs", "-1", "--json"], "--logprobs is -1"),
    ([TEXT, "--logprobs", "100000", "--json"], "--logprobs is 100000"),
    ([TEXT, "--method", "ngrm"], "unknown method 'ngrm'"),
    ([TEXT, "--method", ""], "unknown method ''"),
    ([TEXT, "--method", "n" * 5000], "unknown method 'nnn"),
    ([TEXT, "--method", "composite"], "unknown method 'composite'"),
    ([TEXT, "--method", "suffix,ngrm"], "unknown method 'ngrm'"),
    ([TEXT, "--method", "suffix,none"], "none"),
    ([TEXT, "--method", "suffix", "--draft-model", "smollm2-135m"], "contradicts --method suffix"),
    ([TEXT, "--method", "draft_model"], "needs a draft model"),
    ([TEXT, "--method", "ngram", "--draft-model", "smollm2-135m"], "contradicts --method ngram"),
    ([TEXT, "--draft-dtype", "int3"], "unknown --draft-dtype 'int3'"),
    ([TEXT, "--draft-dtype", "int8", "--method", "ngram"], "--draft-dtype int8 contradicts --method ngram"),
    (
        [TEXT, "--draft-dtype", "int8", "--method", "suffix,ngram"],
        "--draft-dtype int8 contradicts --method suffix,ngram",
    ),
    ([TEXT, "--draft-dtype", "int8", "-k", "0"], "--draft-dtype contradicts --num-draft-tokens 0"),
    ([TEXT, "--draft-dtype", "int8", "--method", "early_exit"], "--draft-dtype is int8"),
    ([TEXT, "--draft-vocab-size", "0"], "--draft-vocab-size is 0"),
    ([TEXT, "--draft-vocab-size", "9", "--method", "medusa"], "--draft-vocab-size 9 contradicts --method medusa"),
    ([TEXT, "--draft-vocab-size", "9"], "--draft-vocab-size"),
    ([TEXT, "--draft-confidence-threshold", "1.5"], "--draft-confidence-threshold is 1.5"),
    ([TEXT, "--draft-confidence-threshold", "nan"], "--draft-confidence-threshold is nan"),
    ([TEXT, "--draft-confidence-threshold", "0.4", "--method", "none"], "--draft-confidence-threshold 0.4 contradicts"),
    ([TEXT, "--method", "none", "--num-draft-tokens", "3"], "--num-draft-tokens 3 contradicts method none"),
    ([TEXT, "-k", "0", "--draft-model", "smollm2-135m"], "contradicts --num-draft-tokens 0"),
    ([TEXT, "--rule", "typical"], "--rule typical is lossy"),
    ([TEXT, "--raw", "--system", "x"], "--system contradicts --raw"),
    ([TEXT, "--file", "prompt.txt"], "two prompts"),
    (["--file", "no-such-file.txt"], "--file no-such-file.txt: No such file"),
    (["--file", "."], "--file .: Is a directory"),
    ([TEXT, "--threads", "0"], "--threads is 0"),
    ([TEXT, "--threads", str(10**30)], "--threads is 1000"),
    ([TEXT, "--threads", "1" + "0" * 4000], "--threads is 1000"),
    ([TEXT, "--dtype", "int3"], "unknown --dtype 'int3'"),
    ([TEXT, "--device", "abacus"], "--device abacus"),
    ([TEXT, "--device", "cpu:7"], "--device cpu:7"),
    ([TEXT, "--device", "cuda:99"], "--device cuda:99 is not available"),
    ([TEXT, "--max-context", "100000"], "--max-context 100000"),
    ([TEXT, "--max-context", "0"], "--max-context is 0"),
    ([TEXT * 30, "--max-context", "64"], "64"),
    ([TEXT * 30], f"{CONTEXT}"),
    ([TEXT, "--model", ""], "--model is empty"),
    ([TEXT, "--draft-model", " "], "--draft-model is empty"),
    ([TEXT, "--draft-model", "no/such/folder"], "no/such/folder"),
    (["\udcff"], "not UTF-8"),
]


@pytest.mark.parametrize(("arguments", "culprit"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_bad_input_is_one_line_and_a_hint_and_nothing_else(
    arguments: list[str], culprit: str, generate: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_pass(*args: Any, **kwargs: Any) -> None:
        pytest.fail("something was generated")

    monkeypatch.setattr("paceline.models.decoder.Decoder.logits", no_pass)
    status, out, err = generate(*arguments)
    assert status == 1
    assert out == ""
    error, hint = err.splitlines()[-2:]
    assert error.startswith("error: ") and culprit in error
    assert hint.startswith("hint: ")
    assert len(error) < 300 and err.count("error: ") == 1 and "Traceback" not in err
    parameters = ("max_tokens", "min_tokens", "top_p", "top_k", "min_p", "_penalty", "max_context", "num_")
    assert not any(name in err for name in parameters)


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
