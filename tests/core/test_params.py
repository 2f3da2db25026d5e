"""Every value out of its range is refused in one line that names the parameter and the value."""

import math

import pytest

from paceline.core.params import SamplingParams
from paceline.errors import PacelineError

BAD = [
    ("temperature", [-0.1, math.nan, math.inf, True, "1", None]),
    ("top_p", [0, -0.5, 1.01, math.nan, False, None]),
    ("top_k", [-2, 1.5, True, None]),
    ("min_p", [-0.1, 1.1, math.nan]),
    ("seed", [-1, 2**64, 1.0, True, "7"]),
    ("n", [0, -1, 1.5, True]),
    ("max_tokens", [0, -5, 2.0, True]),
    ("min_tokens", [-1, 0.5, None]),
    ("presence_penalty", [-2.1, 2.1, math.nan]),
    ("frequency_penalty", [-2.1, 2.1, math.inf]),
    ("repetition_penalty", [0, -1, math.nan, math.inf]),
    ("logprobs", [-1, True, 1.5]),
    ("ignore_eos", [1, None]),
    ("stop", ["", ["a", ""], [3], 3, {"a"}, {"a": 1}, b"a"]),
    ("stop_token_ids", [[-1], [1.5], [True], 5, {5}, {5: 1}, b"5", "5"]),
    ("logit_bias", [{1: 101}, {1: -100.5}, {1: math.nan}, {-1: 0}, {"3": 1}, 7, [1, 2]]),
    ("bad_words", [[[]], [[1, -2]], [[True]], [3], 3, [""], "", {"a"}, {"a": 1}, [{5}], [b"a"]]),
]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD for value in values])
def test_bad_values_are_refused_by_name(name, value):
    with pytest.raises(PacelineError) as error:
        SamplingParams(**{name: value})
    message = str(error.value)
    assert name in message and "\n" not in message


def test_the_message_gives_value_and_range():
    with pytest.raises(PacelineError, match=r"^top_p is 1\.5; it must be a number above 0 and at most 1$"):
        SamplingParams(top_p=1.5)
    with pytest.raises(PacelineError, match=r"^seed is -1; it must be a whole number, at least 0 and at most 18446744"):
        SamplingParams(seed=-1)


@pytest.mark.parametrize(
    "values", [{"min_tokens": 5, "max_tokens": 4}, {"n": 2, "temperature": 0}, {"n": 2, "top_k": 1}]
)
def test_contradictions_are_refused_with_both_values(values):
    with pytest.raises(PacelineError, match=r" is .* is "):
        SamplingParams(**values)


def test_defaults_are_vllms():
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.n) == (1.0, 1.0, 0, 0.0, 1)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (params.seed, params.max_tokens, params.logprobs, params.ignore_eos) == (None, None, None, False)
    assert not params.is_greedy and not params.has_penalties


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0},
        {"temperature": 1e-6, "top_p": 1e-9, "top_k": -1, "min_p": 1},
        {"seed": 2**64 - 1, "n": 128, "max_tokens": 10**9, "min_tokens": 10**9},
        {"logit_bias": {0: -100, 1: 100}, "repetition_penalty": 1e-3},
        {"stop": [], "stop_token_ids": [], "bad_words": [], "logit_bias": {}, "logprobs": 0},
        {"stop": None, "stop_token_ids": None, "bad_words": None, "logit_bias": None},
    ],
)
def test_extremes_are_accepted(values):
    SamplingParams(**values)


def test_greedy_by_temperature_and_equally_by_top_k():
    assert SamplingParams(temperature=0, top_p=0.5).is_greedy and SamplingParams(top_k=1).is_greedy
    assert not SamplingParams(top_k=2).is_greedy
    assert not SamplingParams(top_k=50).is_greedy  # an unset temperature is 1, not 0


def test_lists_are_copied():
    words, stops = [[1, 2]], ["end"]
    params = SamplingParams(bad_words=words, stop=stops)
    words[0].append(3)
    stops.append("x")
    assert params.bad_words == ((1, 2),) and params.stop == ("end",)
    assert SamplingParams(stop="one").stop == ("one",)


@pytest.mark.parametrize("name", ["logit_bias", "stop_token_ids", "bad_words"])
def test_token_ids_outside_the_vocabulary_are_refused(name):
    value = {"logit_bias": {9: 1.0}, "stop_token_ids": [2, 9], "bad_words": [[1], [9, 0]]}[name]
    SamplingParams(**{name: value}).check_vocabulary(10)
    with pytest.raises(PacelineError, match=f"{name} names token 9 and the vocabulary has 9"):
        SamplingParams(**{name: value}).check_vocabulary(9)


def test_more_logprobs_than_tokens_are_refused():
    with pytest.raises(PacelineError, match="logprobs is 11"):
        SamplingParams(logprobs=11).check_vocabulary(10)


def test_hugging_face_names_are_aliases() -> None:
    given = {
        "max_new_tokens": 9,
        "min_new_tokens": 2,
        "num_return_sequences": 3,
        "eos_token_id": 7,
        "stop_strings": ["a"],
        "bad_words_ids": [[1, 2]],
        "temperature": 0.5,
    }
    expected = SamplingParams(
        max_tokens=9, min_tokens=2, n=3, stop_token_ids=[7], stop=["a"], bad_words=[[1, 2]], temperature=0.5
    )
    assert SamplingParams.from_dict(given) == expected
    assert SamplingParams.from_dict({"eos_token_id": [7, 8]}).stop_token_ids == (7, 8)
    assert SamplingParams.from_dict({"do_sample": False}).is_greedy
    assert not SamplingParams.from_dict({"do_sample": True}).is_greedy


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_tokenz": 1}, "unknown sampling parameter 'max_tokenz'"),
        ({"max_tokens": 1, "max_new_tokens": 2}, "max_tokens is given twice: max_new_tokens"),
        ({"do_sample": "no"}, "do_sample is 'no'; it must be true or false"),
        ({"do_sample": None}, "do_sample is None; it must be true or false"),
        ({"do_sample": False, "temperature": 0.7}, "do_sample is false and temperature is 0.7"),
    ],
)
def test_other_names_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(PacelineError, match=message):
        SamplingParams.from_dict(given)


def test_texts_among_the_bad_words_need_token_ids() -> None:
    params = SamplingParams(bad_words=["ab", (5, 6)])
    with pytest.raises(PacelineError, match="bad_words holds the text 'ab'"):
        params.check_vocabulary(10)
    resolved = params.with_bad_words(lambda text: [[1, 2], [3]])
    assert resolved.bad_word_ids == ((1, 2), (3,), (5, 6))
    resolved.check_vocabulary(10)
    assert SamplingParams(bad_words="ab").bad_words == ("ab",)
