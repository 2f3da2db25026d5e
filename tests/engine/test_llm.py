"""The facade: what goes in, what comes out, and what is refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from engine.running import plain

from paceline.core.params import SamplingParams
from paceline.engine.engine import RequestOptions
from paceline.engine.llm import LLM
from paceline.errors import PacelineError
from paceline.models.load import LoadedModel, load_model

GREEDY = SamplingParams(temperature=0, max_tokens=16)
SETTINGS = {"max_num_seqs": 4, "kv_cache_memory_bytes": 4_000_000}


@pytest.fixture(scope="module")
def model(tiny_llama_dir: Path) -> LoadedModel:
    return load_model(str(tiny_llama_dir), dtype="bf16")


def test_prompts_of_every_kind_in_one_call(model: LoadedModel) -> None:
    llm = LLM(model, {"method": "ngram", "num_speculative_tokens": 3}, **SETTINGS)
    assert model.tokenizer is not None
    ids = model.tokenizer.encode("hello", add_special=True)
    prompts = ["hello", ids, {"prompt": "hello"}, {"prompt_token_ids": ids}, "another one"]
    outputs = llm.generate(prompts, GREEDY)
    expected = plain(model.decoder, ids, GREEDY)
    for output in outputs[:4]:
        assert list(output.outputs[0].token_ids) == expected
        assert output.prompt_token_ids == tuple(ids)
        assert output.outputs[0].text == model.tokenizer.decode(expected)
        assert output.usage.total_tokens == len(ids) + len(expected)
    assert [output.prompt for output in outputs] == ["hello", None, "hello", None, "another one"]
    assert list(llm.generate(ids, GREEDY)[0].outputs[0].token_ids) == expected
    assert list(llm.generate("hello", GREEDY)[0].outputs[0].token_ids) == expected


def test_a_bad_word_may_be_a_text(model: LoadedModel) -> None:
    llm = LLM(model, {"method": "ngram", "num_speculative_tokens": 3}, **SETTINGS)
    tokenizer = llm.tokenizer
    free = llm.generate("hello", GREEDY)[0].outputs[0].token_ids
    alone = [token for token in free if tokenizer.encode(tokenizer.decode([token]), add_special=False) == [token]]
    word = tokenizer.decode(alone[:1])
    for banned in (word, [word]):
        params = replace(GREEDY, bad_words=banned)
        answers = (llm.generate("hello", params)[0].outputs[0], list(llm.stream("hello", params))[-1].output.outputs[0])
        assert answers[0] == answers[1] and alone[0] not in answers[0].token_ids


def test_a_stream_is_the_answer_piece_by_piece(model: LoadedModel) -> None:
    """Alone, beside another stream, and beside a call in between: the same as not streamed."""
    llm = LLM(model, {"method": "ngram"}, **SETTINGS)
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=20)
    (whole,) = llm.generate("hello", params)
    updates = list(llm.stream("hello", params))
    assert "".join(update.text for update in updates) == whole.outputs[0].text
    assert tuple(token for update in updates for token in update.token_ids) == whole.outputs[0].token_ids
    assert updates[-1].output is not None
    assert updates[-1].output.outputs == whole.outputs
    first, second = llm.stream("hello", params), llm.stream("hello", params)
    pieces: tuple[list[str], list[str]] = ([], [])
    for a in first:
        pieces[0].append(a.text)
        if (b := next(second, None)) is not None:
            pieces[1].append(b.text)
        llm.generate("in between", replace(params, max_tokens=2))
    pieces[1].extend(update.text for update in second)
    assert "".join(pieces[0]) == "".join(pieces[1]) == whole.outputs[0].text


def test_a_closed_stream_is_cancelled(model: LoadedModel) -> None:
    llm = LLM(model, **SETTINGS)
    stream = llm.stream("hello", SamplingParams(max_tokens=50))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert not llm.engine.has_unfinished
    llm.reset_prefix_cache()
    assert llm.engine.pool.blocks_in_use == 0


def test_a_stream_that_nobody_reads_leaves_nothing(model: LoadedModel) -> None:
    llm = LLM(model, **SETTINGS)
    for stream in [llm.stream("hello", GREEDY) for _ in range(3)]:
        stream.close()  # type: ignore[attr-defined]
    llm.stream("hello", GREEDY)
    assert not llm.engine.has_unfinished


def test_methods_keep_their_settings(model: LoadedModel) -> None:
    """A second configuration is not ignored; another K is taken."""
    llm = LLM(model, {"method": "ngram", "num_speculative_tokens": 2}, **SETTINGS)
    text = [[1, 2, 3, 4, 5, 6, 7, 8] * 4]

    def most_drafted(options: RequestOptions | None = None) -> int:
        (output,) = llm.generate(text, SamplingParams(temperature=0, max_tokens=2, logit_bias={1: 100}), options)
        return output.metrics.speculation.num_draft_tokens

    with pytest.raises(PacelineError, match="'ngram' is loaded already, with other settings"):
        llm.add_method({"method": "ngram", "prompt_lookup_max": 7})
    assert llm.add_method({"method": "ngram", "num_speculative_tokens": 2}) == "ngram"
    assert llm.add_method({"method": "suffix", "num_speculative_tokens": 1}) == "suffix"
    assert most_drafted() == most_drafted(RequestOptions(method="suffix")) == 1
    long = SamplingParams(temperature=0, max_tokens=9)
    for k in (2, 5):
        llm.add_method({"method": "ngram", "num_speculative_tokens": k})
        stream = llm.stream(text[0], long)
        next(stream)
        (sequence,) = llm.engine.scheduler.running
        assert sequence.request.num_draft_tokens == k
        stream.close()  # type: ignore[attr-defined]


def test_chat_uses_the_template_and_finds_earlier_turns(model: LoadedModel) -> None:
    llm = LLM(model, {"method": "draft_model", "model": str(model.name)}, **SETTINGS)
    messages = [{"role": "user", "content": "tell me a story, a rather long one if you please, about a wolf and a hat"}]
    (output,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=40))
    assert list(output.prompt_token_ids) == llm.chat_ids(messages)
    assert output.metrics.speculation.draft_acceptance_rate == 1
    several = llm.chat([messages, messages], GREEDY)
    assert [out.outputs[0].token_ids for out in several] == [output.outputs[0].token_ids[:16]] * 2
    assert several[0].usage.cached_tokens >= 64
    with pytest.raises(PacelineError, match="conversation is empty"):
        llm.chat([])


def test_one_set_of_parameters_or_one_each(model: LoadedModel) -> None:
    llm = LLM(model, {"method": "ngram"}, **SETTINGS)
    each = [GREEDY, SamplingParams(seed=1, max_tokens=5)]
    outputs = llm.generate(["a", "b"], each, [RequestOptions(), RequestOptions(speculative=False)])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [16, 5]
    assert outputs[1].seed == 1
    with pytest.raises(PacelineError, match="2 sampling_params for 3 prompts"):
        llm.generate(["a", "b", "c"], each)


def test_a_bad_request_stops_the_call_before_any_has_begun(model: LoadedModel) -> None:
    llm = LLM(model, max_model_len=100, **SETTINGS)
    for bad in ([1] * 100, [], [1, 99_999]):
        with pytest.raises(PacelineError):
            llm.generate([[1, 2], bad], GREEDY)
        assert not llm.engine.has_unfinished
    with pytest.raises(PacelineError, match="100 tokens but the context holds 100"):
        llm.stream([1] * 100, GREEDY)
    for strange in ({"text": "x"}, {}, ["a", 1.5], ["a", 5], [{"prompt_token_ids": "a"}, 3]):
        with pytest.raises(PacelineError):
            llm.generate(strange, GREEDY)  # type: ignore[arg-type]
    assert len(llm.generate([1, 2], GREEDY)) == 1


def test_settings_that_cannot_be_are_refused(model: LoadedModel) -> None:
    cases = [
        ({"speculative_config": {"method": "guess"}}, "unknown speculative method 'guess'"),
        ({"speculative_config": {"k": 3}}, "no key 'k'"),
        ({"max_model_len": 100_000}, "max_model_len is 100000, and the model has 512"),
        ({"max_model_len": 512, "kv_cache_memory_bytes": 100_000}, "has room for"),
        ({"kv_cache_memory_bytes": 100}, "may take 100 bytes"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"dtype": "fp32"}, "loaded model are settled"),
    ]
    for settings, message in cases:
        with pytest.raises(PacelineError, match=message):
            LLM(model, **settings)  # type: ignore[arg-type]
    with pytest.raises(PacelineError, match="no model"):
        LLM("/nowhere/at/all")
    with pytest.raises(PacelineError, match="is no model"):
        LLM(3)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_a_loaded_transformers_model(family: str, tiny_llama_dir: Path) -> None:
    """Greedy ids equal transformers' own in float64; a tied head comes along."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_llama_dir)
    hf = tiny.hf_model(tiny.hf_config(family, vocab_size=len(tokenizer), tie_word_embeddings=family == "gemma3"))
    llm = LLM((hf, tokenizer), {"method": "ngram"}, **SETTINGS)
    (output,) = llm.generate("hello", SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    ids = torch.tensor([list(output.prompt_token_ids)])
    for token in output.outputs[0].token_ids:
        assert token == int(hf(ids).logits[0, -1].argmax())
        ids = torch.cat((ids, torch.tensor([[token]])), dim=1)
    assert llm.model.precision == "fp64"
    without = LLM(hf, dtype="fp32", **SETTINGS)
    assert without.generate(list(output.prompt_token_ids), GREEDY)[0].outputs[0].text == ""
    with pytest.raises(PacelineError, match="has no tokenizer"):
        without.generate("hello")


def test_a_method_without_a_model_is_loaded_when_first_named(model: LoadedModel) -> None:
    llm = LLM(model, **SETTINGS)
    (output,) = llm.generate([[1, 2, 1, 2, 1, 2, 1]], GREEDY, RequestOptions(method="ngram"))
    assert output.metrics.speculation.num_draft_tokens > 0
    with pytest.raises(PacelineError, match="'draft_model' is not loaded"):
        llm.generate("a", GREEDY, RequestOptions(method="draft_model"))


@pytest.mark.parametrize(
    "prompts",
    [
        *(None, 3, 1.5, b"abc", [True, 2], [1, 2.0], "\ud800", ["a", "b\ud800c"], [None], {"prompt": "\udfff"}),
        *({"prompt_token_ids": "text"}, {"prompt": "a", "more": 1}, {1: 2, "a": 3}, np.array([1.5]), np.array([True])),
    ],
)
def test_what_is_no_prompt_is_refused_in_one_line(model: LoadedModel, prompts: Any) -> None:
    llm = LLM(model, **SETTINGS)
    calls: list[Callable[[], object]] = [lambda: llm.generate(prompts, GREEDY)]
    if not isinstance(prompts, list):
        calls.append(lambda: llm.stream(prompts, GREEDY))
    for call in calls:
        with pytest.raises(PacelineError) as caught:
            call()
        assert caught.value.hint
        assert "\n" not in str(caught.value)
    assert not llm.engine.has_unfinished


def test_arrays_of_token_ids_are_prompts(model: LoadedModel) -> None:
    llm = LLM(model, **SETTINGS)
    ids = [5, 6, 7]
    (expected,) = llm.generate(ids, GREEDY)
    arrays: list[Any] = [
        np.array(ids),
        torch.tensor(ids),
        [np.int32(i) for i in ids],
        {"prompt_token_ids": np.array(ids)},
    ]
    for given in (*arrays, [np.array(ids)], np.array([ids]), [torch.tensor(ids)], tuple(ids)):
        (output,) = llm.generate(given, GREEDY)
        assert output.prompt_token_ids == tuple(ids)
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert len(llm.generate(np.array([ids, ids]), GREEDY)) == 2


@pytest.mark.parametrize(
    "messages",
    [
        *("hi", None, 3, {"role": "user", "content": "hi"}, ["hi"], [["hi"]], [], [[]], [None]),
        *([{"role": "user", "content": "\ud800"}], [{"content": "hi"}]),
    ],
)
def test_what_is_no_conversation_is_refused_in_one_line(model: LoadedModel, messages: Any) -> None:
    llm = LLM(model, **SETTINGS)
    with pytest.raises(PacelineError) as caught:
        llm.chat(messages, GREEDY)
    assert caught.value.hint


@pytest.mark.parametrize(
    "settings",
    [{name: value} for name in ("max_num_seqs", "max_num_batched_tokens") for value in (2.5, "4", True, None)]
    + [{"max_model_len": 100.0}, {"kv_cache_memory_bytes": 4e6}, {"enable_prefix_caching": "no"}]
    + [{"speculative_config": value} for value in (3, ["ngram"], "bogus", b"ngram")],
)
def test_settings_of_the_wrong_kind_are_refused(model: LoadedModel, settings: dict[str, Any]) -> None:
    with pytest.raises(PacelineError):
        LLM(model, **{**SETTINGS, **settings})


def test_a_methods_name_is_a_configuration(model: LoadedModel) -> None:
    llm = LLM(model, "ngram", **SETTINGS)
    assert llm.speculative_config == LLM(model, {"method": "ngram"}, **SETTINGS).speculative_config
    for options in (
        RequestOptions(speculative=False, method="bogus"),
        RequestOptions(method="bogus"),
        3,
        {"method": "ngram"},
    ):
        for call in (llm.generate, llm.stream):
            with pytest.raises(PacelineError):
                call([1, 2], GREEDY, options)  # type: ignore[arg-type]
