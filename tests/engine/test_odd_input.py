"""Whatever is handed to the engine or its facade: an answer, or one line that names the culprit, and nothing begun."""

from collections.abc import Callable, Hashable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from engine.running import make_engine
from transformers import AutoTokenizer

from paceline.core.params import SamplingParams
from paceline.decode import decode
from paceline.drafters import registry
from paceline.drafters.config import SpeculativeConfig
from paceline.drafters.none import NoDrafter
from paceline.engine.arguments import speculative_config_of
from paceline.engine.engine import Engine, EngineConfig, RequestOptions
from paceline.engine.llm import LLM
from paceline.engine.request import MAX_CHOICES
from paceline.errors import PacelineError
from paceline.models.decoder import Decoder
from paceline.models.load import LoadedModel, load_model

GREEDY = SamplingParams(temperature=0, max_tokens=3)
SETTINGS: dict[str, Any] = {"max_num_seqs": 4, "kv_cache_memory_bytes": 4_000_000}
OBJECTS: tuple[Any, ...] = (None, 3, 2.5, True, "x", b"x", [], {}, {1}, object(), int)
HUGE = 10**5000  # of more digits than Python writes; JSON can carry 10**400, which no float holds
MONSTERS: tuple[Any, ...] = (
    HUGE,
    -HUGE,
    10**400,
    float("nan"),
    "a\nb",
    "[" * 10_000,
    ["x" * 500],
    [HUGE],
    [[HUGE]],
    {HUGE: HUGE},
    {1: 10**400},
    np.array(3),
    np.zeros((40, 40), dtype=int),
    torch.zeros(40, 40),
    memoryview(b"ab"),
    *OBJECTS,
)


@pytest.fixture(scope="module")
def model(tiny_llama_dir: Path) -> LoadedModel:
    return load_model(str(tiny_llama_dir), dtype="bf16")


@pytest.fixture(scope="module")
def llm(model: LoadedModel) -> LLM:
    return LLM(model, **SETTINGS)


@pytest.fixture(scope="module")
def target() -> Decoder:
    return tiny.tiny_decoder("llama", dtype=torch.bfloat16, num_hidden_layers=1)


def refused(call: Callable[[], object], *words: str) -> None:
    with pytest.raises(PacelineError) as caught:
        call()
    message = str(caught.value)
    assert len(message.splitlines()) == 1 and len(message) < 300
    assert all(word in message for word in words), message


def checked(call: Callable[[], object]) -> bool:
    """Whether a value is taken; if it isn't, one line says why."""
    try:
        call()
    except PacelineError:
        refused(call)
        return False
    return True


@pytest.mark.parametrize("name", [field.name for field in fields(SamplingParams)])
def test_every_parameter_is_checked(target: Decoder, name: str) -> None:
    engine = make_engine(target)
    for value in MONSTERS:
        for made in (lambda values: SamplingParams(**values), SamplingParams.from_dict):
            values = {name: value}
            if checked(lambda made=made, values=values: made(values)):  # type: ignore[misc]
                params = made(values)
                checked(lambda params=params: engine.check_request([1], params))  # type: ignore[misc]


def test_numbers_that_no_float_holds() -> None:
    for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
        for value in (10**400, -(10**400), HUGE, float("inf"), float("nan")):
            refused(lambda name=name, value=value: SamplingParams(**{name: value}), f"{name} is ")  # type: ignore[misc]
    refused(lambda: SamplingParams(logit_bias={3: 10**400}), "logit_bias of token 3 is ")
    refused(lambda: SpeculativeConfig(method="suffix", suffix_decoding_min_token_prob=10**400), "min_token_prob is ")
    refused(lambda: SamplingParams.from_dict({"do_sample": False, "temperature": HUGE}), "temperature is ")


@pytest.mark.parametrize("name", [field.name for field in fields(SpeculativeConfig)])
def test_every_key_of_speculative_config_is_checked(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(registry, "_installed", lambda: ())  # looking for other packages takes a millisecond
    for value in MONSTERS:
        checked(lambda value=value: SpeculativeConfig(**{name: value}))  # type: ignore[misc]
        for method in (None, "none", "suffix", "lookahead", "auto", "composite", "eagle3"):
            values = {name: value} if method is None else {"method": method, name: value}
            checked(lambda values=values: speculative_config_of(values))  # type: ignore[misc]


def test_what_is_no_mapping() -> None:
    for value in (3, None, "x", [], [("n", 1)], {1}, np.zeros((2, 2)), HUGE):
        refused(lambda value=value: SamplingParams.from_dict(value), "mapping")  # type: ignore[misc]
        refused(lambda value=value: SpeculativeConfig.from_dict(value), "mapping")  # type: ignore[misc]


@pytest.mark.parametrize("prompt", [[1, None], [None], ["a"], ["a", "b"], [1, []], [float("inf")]])
def test_a_stream_of_no_prompt(llm: LLM, prompt: Any) -> None:
    refused(lambda: llm.stream(prompt, GREEDY), "prompt")


NO_IDS: tuple[Callable[[], Any], ...] = (
    lambda: {1, 2},
    lambda: frozenset([1]),
    lambda: {1: 2}.keys(),
    lambda: iter([1]),
    lambda: b"abc",
    lambda: bytearray(b"abc"),
    lambda: memoryview(b"abc"),
)


@pytest.mark.parametrize("made", NO_IDS)
def test_what_is_no_prompt_is_none_for_any_entry(llm: LLM, target: Decoder, made: Callable[[], Any]) -> None:
    for wrapped in (lambda: made(), lambda: {"prompt_token_ids": made()}):
        refused(lambda wrapped=wrapped: llm.stream(wrapped(), GREEDY), "prompt")  # type: ignore[misc]
        refused(lambda wrapped=wrapped: llm.generate(wrapped(), GREEDY), "prompt")  # type: ignore[misc]
        refused(lambda wrapped=wrapped: llm.generate([wrapped()], GREEDY), "prompt")  # type: ignore[misc]
    refused(lambda: make_engine(target).add_request(made(), GREEDY), "prompt")


def test_an_array_is_a_prompt_for_both(llm: LLM) -> None:
    for ids in (np.array([1, 2]), torch.tensor([1, 2]), [np.int64(1), 2], (1, 2), range(1, 3)):
        (output,) = llm.generate(ids, GREEDY)  # type: ignore[arg-type]
        streamed = [token for update in llm.stream(ids, GREEDY) for token in update.token_ids]  # type: ignore[arg-type]
        assert streamed == list(output.outputs[0].token_ids)


@pytest.mark.parametrize("given", [3, "x", {"temperature": 0}, [GREEDY, GREEDY], [3], object(), SamplingParams])
def test_parameters_and_options_of_another_kind(llm: LLM, given: Any) -> None:
    chat: Any = [{"role": "user", "content": "a"}]
    for call, what in ((llm.stream, "hi"), (llm.generate, "hi"), (llm.chat, chat)):
        refused(lambda call=call, what=what: call(what, given), "sampling_params")  # type: ignore[misc]
        refused(lambda call=call, what=what: call(what, GREEDY, given), "options")  # type: ignore[misc]
    assert not llm.engine.has_unfinished


@pytest.mark.parametrize("content", [3, None, ["a"], [{"type": "text", "text": "a"}], {"text": "a"}])
def test_a_message_without_text(llm: LLM, content: Any) -> None:
    """A template would write down whatever it is, as Python spells it."""
    refused(lambda: llm.chat([{"role": "user", "content": content}], GREEDY), "content")


@pytest.mark.parametrize(
    ("name", "fine"),
    [("constraint", (None,)), ("rule", ("x",)), ("speculative", (True,)), ("private_drafts", (True,)),
     ("method", (None, "x")), ("num_speculative_tokens", (None, 3))],
)  # fmt: skip
def test_every_option_is_checked(name: str, fine: tuple[Any, ...]) -> None:
    for value in MONSTERS:
        if name in ("rule", "method") and isinstance(value, str):
            continue  # names; which are known is the engine's to say
        if not any(type(value) is type(good) and value == good for good in fine):
            refused(lambda value=value: RequestOptions(**{name: value}), name)  # type: ignore[misc]


def test_a_class_is_no_constraint_and_no_rule() -> None:
    class Allowing:
        start = advance = allowed = verify = target_rows = draft_sampler = print

    RequestOptions(constraint=Allowing(), rule=Allowing())  # type: ignore[arg-type]
    refused(lambda: RequestOptions(constraint=Allowing), "constraint")  # type: ignore[arg-type]
    refused(lambda: RequestOptions(rule=Allowing), "rule")  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [[], {}, 2.5, 0, 3, b"cpu", "", "nonsense", "cpu:7", object()])
def test_dtype_and_device(tiny_llama_dir: Path, value: Any) -> None:
    folder = str(tiny_llama_dir)
    refused(lambda: LLM(folder, dtype=value))
    refused(lambda: LLM(folder, device=value), "device")
    for progress in (3, None, "x", []):
        refused(lambda progress=progress: LLM(folder, progress=progress), "progress")  # type: ignore[misc]
    assert LLM(folder, device=torch.device("cpu"), **SETTINGS).model.precision  # type: ignore[arg-type]


def test_models_of_no_kind(model: LoadedModel, tiny_llama_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama_dir)
    hf = tiny.hf_model(tiny.hf_config("llama", vocab_size=len(tokenizer)))
    for given in (
        (),
        (hf,),
        (hf, tokenizer, tokenizer),
        (model,),
        (model, tokenizer),
        (tokenizer, hf),
        [hf, tokenizer],
    ):
        refused(lambda given=given: LLM(given), "tuple" if isinstance(given, tuple) and len(given) != 2 else "no model")  # type: ignore[misc]
    for odd in (None, 3, b"x", "", "a\0b", type(hf), torch.nn.Linear(2, 2), Path("/nowhere")):
        refused(lambda odd=odd: LLM(odd))  # type: ignore[misc]
    refused(lambda: LLM(hf, device=""), "device")


@pytest.mark.parametrize(
    "config",
    [
        *({"method": method, "model": 3} for method in ("draft_model", "medusa", "eagle3")),
        *({"model": []}, {"method": "composite", "methods": ["suffix", {"method": "draft_model", "model": 3}]}),
        *({"method": "draft_model", "model": "x", "draft_dtype": dtype} for dtype in ([], 3)),
    ],
)
def test_a_draft_model_of_no_kind(model: LoadedModel, llm: LLM, config: Any) -> None:
    refused(lambda: LLM(model, config, **SETTINGS), "draft")
    refused(lambda: llm.add_method(config), "draft")


def test_no_configuration_is_no_method_to_add(llm: LLM) -> None:
    refused(lambda: llm.add_method(None), "speculative_config is None")  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [MAX_CHOICES + 1, 10**9])
def test_more_choices_than_can_ever_be(llm: LLM, target: Decoder, n: int) -> None:
    params = SamplingParams(n=n, max_tokens=1)
    refused(lambda: llm.generate("hi", params), f"n is {n}")
    refused(lambda: llm.stream("hi", params), f"n is {n}")
    refused(lambda: make_engine(target).add_request([1], params), f"n is {n}")


@pytest.mark.parametrize(
    "prompt", [None, 3, "abc", b"abc", {1}, iter([1]), np.array([1]), torch.tensor([1]), [1, None]]
)
def test_what_is_no_list_of_ids(target: Decoder, prompt: Any) -> None:
    engine = make_engine(target)
    refused(lambda: engine.add_request(prompt, GREEDY), "prompt")
    refused(lambda: engine.check_request(prompt, GREEDY), "prompt")
    assert not engine.has_unfinished


def test_what_is_no_request(target: Decoder) -> None:
    engine = make_engine(target)
    for odd in OBJECTS:
        refused(lambda odd=odd: engine.add_request([1], odd), "parameters")  # type: ignore[misc]
        if odd is not None:
            refused(lambda odd=odd: engine.add_request([1], GREEDY, odd), "options")  # type: ignore[misc]
            refused(lambda odd=odd: engine.check_request([1], GREEDY, odd), "options")  # type: ignore[misc]
        if odd is not None and odd != "x":
            refused(lambda odd=odd: engine.add_request([1], GREEDY, None, odd), "prompt")  # type: ignore[misc]
    assert not engine.has_unfinished


def test_what_is_no_method(target: Decoder) -> None:
    engine = make_engine(target)
    for odd in (*OBJECTS, "none", "", " ", "two\nlines", "x "):
        if odd != "x":
            refused(lambda odd=odd: engine.add_method(odd, NoDrafter(), 4), "method")  # type: ignore[misc]
        if odd != "x" and isinstance(odd, Hashable):
            refused(lambda odd=odd: make_engine(target, {odd: NoDrafter()}), "method")  # type: ignore[misc]
    refused(lambda: engine.add_method("x", NoDrafter(), HUGE), "num_speculative_tokens")
    assert "x" not in engine.speculation.drafters  # nothing is half added
    refused(lambda: engine.add_request([1], GREEDY, RequestOptions(method="x")), "not loaded")


def test_what_is_no_request_to_cancel(target: Decoder) -> None:
    engine = make_engine(target)
    number = engine.add_request([1], GREEDY)
    for odd in (*OBJECTS, -1, 1.0, str(number)):
        if odd != 3:
            refused(lambda odd=odd: engine.cancel(odd), "request's id")  # type: ignore[misc]
    assert engine.cancel(number + 1) is None and engine.cancel(HUGE) is None  # ended, or never was
    assert engine.cancel(number) is not None


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"method": "none", "num_speculative_tokens": 3}, "num_speculative_tokens 3 contradicts method none"),
        ({"method": "none", "model": "nope"}, "'none' does not take model"),
        ({"method": "none", "prompt_lookup_max": 3}, "'none' does not take prompt_lookup_max"),
        ({"method": "auto", "num_speculative_tokens": 0, "model": "nope"}, "the draft model contradicts"),
        ({"method": "ngram", "num_speculative_tokens": 0, "prompt_lookup_max": 3}, "prompt_lookup_max contradicts"),
        (
            {"methods": ["suffix", {"method": "ngram", "prompt_lookup_max": 3}], "num_speculative_tokens": 0},
            "prompt_lookup_max contradicts",
        ),
    ],
)
def test_nothing_is_taken_and_ignored(model: LoadedModel, config: Any, words: str) -> None:
    refused(lambda: LLM(model, config, **SETTINGS), words)


def test_plain_decoding_by_any_name(model: LoadedModel) -> None:
    for config in ("none", {"method": "none", "num_speculative_tokens": 0}, {"num_speculative_tokens": 0}):
        assert not LLM(model, config, **SETTINGS).engine.speculation.drafters  # type: ignore[arg-type]


def test_an_end_that_is_no_token(target: Decoder) -> None:
    config = EngineConfig(max_model_len=100, num_kv_blocks=4)
    for odd in (target.config.vocab_size, -1, HUGE, True, 1.0, None, "a"):
        refused(lambda odd=odd: Engine(target, config, eos_token_ids=[1, odd]), "eos_token_ids")  # type: ignore[misc]
        refused(lambda odd=odd: next(decode(target, [1], GREEDY, NoDrafter(), eos_token_ids=[odd])), "eos_token_ids")  # type: ignore[misc]


def test_what_is_no_engine(target: Decoder) -> None:
    config = EngineConfig(max_model_len=100, num_kv_blocks=4)
    for odd in OBJECTS:
        refused(lambda odd=odd: Engine(odd, config), "target")  # type: ignore[misc]
        refused(lambda odd=odd: Engine(target, odd), "config")  # type: ignore[misc]
        if odd is not int:
            refused(lambda odd=odd: Engine(target, config, clock=odd), "clock")  # type: ignore[misc]
        if odd is not None:
            refused(lambda odd=odd: Engine(target, config, tokenizer=odd), "tokenizer")  # type: ignore[misc]
        if odd not in (None, {}):
            refused(lambda odd=odd: Engine(target, config, odd), "drafters")  # type: ignore[misc]
        if odd not in (None, []):
            refused(lambda odd=odd: Engine(target, config, eos_token_ids=odd))  # type: ignore[misc]
        if odd != "x":
            refused(lambda odd=odd: Engine(target, config, method=odd), "method")  # type: ignore[misc]
        if odd != 3:
            refused(lambda odd=odd: Engine(target, config, num_draft_tokens=odd), "num_speculative_tokens")  # type: ignore[misc]
    refused(lambda: Engine(target, config, method="x"), "unknown method 'x'")
    refused(lambda: Engine(target, config, {"mine": NoDrafter()}, method="x"), "unknown method 'x'")
    Engine(target, config, {"mine": NoDrafter()}, method="mine")
    Engine(target, config, method="ngram")  # it may be brought later
    refused(lambda: Engine(target, config, {"mine": 3}), "drafter")  # type: ignore[dict-item]
    refused(lambda: Engine(target, config, eos_token_ids=["a"]), "end-of-sequence")  # type: ignore[list-item]
