"""Logits to weights, against a plain-Python account of vLLM's sampler and values worked out by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.history import History
from paceline.core.logprobs import position_logprobs
from paceline.core.params import SamplingParams
from paceline.core.rows import top_ids
from paceline.core.sampling import BadLogitsError, NoTokenAllowedError, token_weights

NONE = History(())


def probabilities(logits, history=NONE, end_tokens=frozenset(), allowed=None, **values) -> list[float]:
    row = torch.tensor(logits, dtype=torch.float64)
    before = row.clone()
    weights = token_weights(row, SamplingParams(**values), history, end_tokens, allowed)
    assert torch.equal(row, before)
    assert weights.dtype == torch.float64 and weights.max() == 1
    return (weights / weights.sum()).tolist()


def reference(logits, params, prompt, generated, end_tokens, allowed) -> list[float]:
    """The order and meaning of vLLM's sampler in lists; top-k keeps exactly k, ties to the lowest id."""
    x = [value if ok else -math.inf for value, ok in zip(logits, allowed, strict=True)]
    for word in params.bad_words:
        *before, last = word
        if not before or list(generated[-len(before) :]) == before:
            x[last] = -math.inf
    if len(generated) < params.min_tokens:
        for token in end_tokens:
            x[token] = -math.inf
    for token, bias in params.logit_bias.items():
        x[token] += bias
    for token in {*prompt, *generated}:
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in generated:
        x[token] -= params.frequency_penalty
    for token in set(generated):
        x[token] -= params.presence_penalty
    order = sorted(range(len(x)), key=lambda token: (-x[token], token))
    if params.temperature == 0:
        order = order[:1]
    else:
        x = [value / params.temperature for value in x]
    peak = max(x)
    p = [math.exp(value - peak) for value in x]
    order = [token for token in order if p[token] >= params.min_p and x[token] > -math.inf]
    if params.top_k > 0:
        order = order[: params.top_k]
    mass, kept = 0.0, []
    for token in order:
        if params.top_p == 1 or mass < params.top_p * sum(p[t] for t in order):
            kept.append(token)
        mass += p[token]
    total = sum(p[token] for token in kept)
    return [p[token] / total if token in kept else 0.0 for token in range(len(x))]


V = 12
ids = st.integers(0, V - 1)


@settings(max_examples=300, deadline=None)
@given(
    logits=st.lists(st.integers(-60, 60).map(lambda i: i / 8 + i % 7 / 1000), min_size=V, max_size=V, unique=True),
    prompt=st.lists(ids, max_size=6),
    generated=st.lists(ids, max_size=6),
    allowed=st.lists(st.booleans(), min_size=V, max_size=V).filter(any),
    params=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0, 0.25, 1, 1.7]),
        top_k=st.sampled_from([-1, 0, 1, 3, V, V + 5]),
        top_p=st.sampled_from([1, 0.93, 0.51, 0.05]),
        min_p=st.sampled_from([0, 0.03, 0.4, 1]),
        min_tokens=st.sampled_from([0, 3]),
        logit_bias=st.dictionaries(ids, st.sampled_from([-100.0, -1.5, 2.25]), max_size=2),
        presence_penalty=st.sampled_from([0, 0.7, -0.7]),
        frequency_penalty=st.sampled_from([0, 0.45, -2]),
        repetition_penalty=st.sampled_from([1, 1.3, 0.5]),
        bad_words=st.lists(st.lists(ids, min_size=1, max_size=3), max_size=2),
    ),
)
def test_equals_the_reference(logits, prompt, generated, allowed, params):
    end_tokens = frozenset({0, 5})
    history = History(tuple(prompt), tuple(generated))
    row = torch.tensor(logits, dtype=torch.float64)
    banned = {word[-1] for word in params.bad_words if history.ends_with(tuple(word[:-1]))}
    banned |= end_tokens if len(generated) < params.min_tokens else set()
    if all(token in banned or not ok for token, ok in enumerate(allowed)):
        with pytest.raises(NoTokenAllowedError):
            token_weights(row, params, history, end_tokens, torch.tensor(allowed))
        return
    weights = token_weights(row, params, history, end_tokens, torch.tensor(allowed))
    expected = reference(logits, params, prompt, generated, end_tokens, allowed)
    torch.testing.assert_close(
        weights / weights.sum(), torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-12
    )


def test_penalties_by_hand():
    history = History((1,), (0, 0))
    p = probabilities(
        [2.0, -1.0, 0.5], history, repetition_penalty=2, frequency_penalty=0.5, presence_penalty=0.25
    )  # 2/2 - 2·0.5 - 0.25 = -0.25; -1·2 = -2; 0.5 was never seen
    z = [math.exp(-0.25), math.exp(-2), math.exp(0.5)]
    assert p == pytest.approx([value / sum(z) for value in z])


def test_negative_and_positive_frequency_penalties_differ():
    """Silently ignored penalties make -2 and +2 the same."""
    history = History((), (0,))
    low, off, high = (probabilities([1.0, 1.0], history, frequency_penalty=f)[0] for f in (2, 0, -2))
    assert low < off < high


def test_presence_and_frequency_ignore_the_prompt_and_repetition_does_not():
    history = History((0,), ())
    assert probabilities([1.0, 1.0], history, presence_penalty=2, frequency_penalty=2) == [0.5, 0.5]
    assert probabilities([1.0, 1.0], history, repetition_penalty=2)[0] < 0.5


def test_bad_words_of_several_tokens_ban_the_last_after_the_first():
    words = [[1, 2], [0]]
    assert probabilities([0.0, 0, 0, 0], bad_words=words) == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3])
    after_one = History((), (1,))
    assert probabilities([0.0, 0, 0, 0], after_one, bad_words=words) == pytest.approx([0, 0.5, 0, 0.5])
    in_prompt = History((1,), ())  # as in vLLM, only generated tokens begin a bad word
    assert probabilities([0.0, 0, 0, 0], in_prompt, bad_words=words)[2] > 0


def test_min_tokens_bans_stop_tokens_until_just_then():
    for length, banned in [(0, True), (2, True), (3, False)]:
        p = probabilities([5.0, 0, 0], History((), (1,) * length), frozenset({0}), min_tokens=3)
        assert (p[0] == 0) == banned


def test_logit_bias_can_lift_and_sink():
    assert probabilities([0.0, 0], logit_bias={1: math.log(3)}) == pytest.approx([0.25, 0.75])
    assert probabilities([10.0, 0], temperature=0, logit_bias={0: -100}) == [0, 1]


def test_top_p_keeps_the_token_that_crosses_the_mass():
    logits = [math.log(x) for x in (0.5, 0.3, 0.15, 0.05)]
    assert probabilities(logits, top_p=0.6) == pytest.approx([0.625, 0.375, 0, 0])
    assert probabilities(logits, top_p=0.4) == [1, 0, 0, 0]
    assert probabilities(logits, top_p=0.8 - 1e-12) == pytest.approx([0.625, 0.375, 0, 0])


def test_top_p_works_on_what_top_k_and_min_p_left():
    logits = [math.log(x) for x in (0.4, 0.3, 0.2, 0.1)]
    assert probabilities(logits, top_k=2, top_p=0.55) == [1, 0, 0, 0]  # 0.4/0.7 is more than 0.55
    assert probabilities(logits, min_p=0.7, top_p=0.55) == [1, 0, 0, 0]


def test_ties_go_to_the_lowest_id():
    assert probabilities([1.0, 3, 3, 3], temperature=0) == [0, 1, 0, 0]
    assert probabilities([1.0, 3, 3, 3], top_k=1) == [0, 1, 0, 0]
    assert probabilities([3.0, 1, 3, 3], top_k=2) == [0.5, 0, 0.5, 0]
    assert probabilities([3.0, 1, 3, 3], top_p=0.5)[2] > 0 and probabilities([3.0, 1, 3, 3], top_p=0.5)[3] == 0
    wide = torch.zeros(151_936)
    wide[[70_000, 150_001]] = 1
    assert token_weights(wide, SamplingParams(temperature=0), NONE).argmax() == 70_000


@pytest.mark.parametrize("temperature", [0, 5e-324, 1e-300, 1e-6, 0.01, 1, 1e308])
@pytest.mark.parametrize("top_k", [-1, 0, 1, 2, 8, 18])
@pytest.mark.parametrize("top_p", [1e-300, 1e-9, 0.8, 1 - 2**-53, 1])
@pytest.mark.parametrize("min_p", [0, 1])
def test_extremes_never_empty_never_nan(temperature, top_k, top_p, min_p):
    for logits in (
        [3.0, -1, 2.9, 0, 0, -5, 1e4, -1e4],
        [0.0] * 8,
        [-math.inf] * 7 + [-1e30],
        [1e38, -1e38] * 4,
    ):
        p = probabilities(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        assert all(math.isfinite(x) for x in p) and sum(p) == pytest.approx(1)
        if temperature == 0 or top_k == 1 or top_p <= 1e-9:
            assert p.index(1) == logits.index(max(logits))


def test_high_temperature_still_ranks_by_logit():
    """At T = 1e308 all weights round to 1; top-k and top-p must not fall back on token order."""
    logits = [0.0, 1.0, 2.0, 3.0]
    assert probabilities(logits, temperature=1e308, top_k=2) == [0, 0, 0.5, 0.5]
    assert probabilities(logits, temperature=1e308, top_p=0.5) == [0, 0, 0.5, 0.5]


@pytest.mark.parametrize("values", [{}, {"temperature": 0}, {"top_k": 3}, {"top_p": 0.9}, {"presence_penalty": 1}])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_infinity_end_the_request(values, bad):
    row = torch.zeros(8)
    row[3] = bad
    with pytest.raises(BadLogitsError, match="position 2") as error:
        token_weights(row, SamplingParams(**values), History((), (1, 1)))
    assert error.value.position == 2


def test_nan_under_a_ban_is_still_an_error():
    row = torch.tensor([math.nan, 1.0])
    with pytest.raises(BadLogitsError):
        token_weights(row, SamplingParams(bad_words=[[0]]), NONE)


def test_a_row_of_nothing_is_an_error_before_and_after_masks():
    with pytest.raises(BadLogitsError, match="nothing but -inf"):
        token_weights(torch.full((4,), -math.inf), SamplingParams(), NONE)
    with pytest.raises(NoTokenAllowedError, match="position 0"):
        token_weights(torch.zeros(4), SamplingParams(), NONE, allowed=torch.zeros(4, dtype=torch.bool))
    with pytest.raises(NoTokenAllowedError):
        token_weights(torch.tensor([0.0, -math.inf]), SamplingParams(temperature=0, bad_words=[[0]]), NONE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0},
        {},
        {"temperature": 0.5},
        {"top_k": 5},
        {"top_p": 0.5},
        {"min_p": 0.1},
        {"logit_bias": {3: 1.0}},
        {"repetition_penalty": 1.5},
        {"bad_words": [[4]]},
    ],
)
def test_inputs_keep_every_bit(dtype, values):
    rows = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = rows.clone()
    history = History((1, 2), (3, 3))
    token_weights(rows[1], SamplingParams(**values), history, allowed=torch.ones(50, dtype=torch.bool))
    token_weights(rows[1], SamplingParams(**values), history)
    assert torch.equal(rows, before)


@pytest.mark.parametrize(
    "values", [{}, {"temperature": 0.8, "top_p": 0.95}, {"top_k": 40, "top_p": 0.9}, {"min_p": 0.01}]
)
def test_bits_do_not_depend_on_threads_or_on_the_rows_place(values):
    rows = torch.randn(3, 50_257, generator=torch.Generator().manual_seed(1)) * 3  # odd: rows lie unaligned
    params, threads = SamplingParams(**values), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = token_weights(rows[1], params, NONE)
        torch.set_num_threads(2)
        two = token_weights(rows[1].clone(), params, NONE)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(one, two)


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=40), st.integers(1, 50))
def test_top_ids_is_the_head_of_a_stable_sort(values, k):
    expected = sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]
    assert top_ids(torch.tensor(values).double(), k).tolist() == expected


# Log-probabilities


def test_logprobs_are_of_the_raw_row():
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    found = position_logprobs(logits, token=2, num_top=3)
    assert found.chosen.logprob == pytest.approx(math.log(0.2), abs=1e-6) and found.chosen.rank == 3
    assert [entry.token_id for entry in found.top] == [1, 3, 2]
    assert [entry.rank for entry in found.top] == [1, 2, 3]
    assert sum(math.exp(entry.logprob) for entry in position_logprobs(logits, 0, 4).top) == pytest.approx(1)


def test_no_alternatives_when_none_are_asked_for():
    found = position_logprobs(torch.tensor([0.0, 0.0]), token=1, num_top=0)
    assert found.top == () and found.chosen.logprob == pytest.approx(-math.log(2)) and found.chosen.rank == 1


# Wide rows: folded scans must find what plain ones find


@pytest.mark.parametrize("vocab_size", [4096, 4999, 151_936])
def test_folded_scans_find_what_plain_ones_find(vocab_size: int) -> None:
    from paceline.core.rows import first_largest, ids_at_least, top_ids

    for seed, dtype in enumerate((torch.bfloat16, torch.float32, torch.float64) * 3):
        generator = torch.Generator().manual_seed(seed)
        row = torch.randn(vocab_size, generator=generator).to(dtype)
        row[torch.randint(0, vocab_size, (3,), generator=generator)] = -torch.inf
        for bound in (row.max(), row.min(), 2.5, 9.0):
            assert torch.equal(ids_at_least(row, bound), (row >= bound).nonzero().flatten())
        stable = row.sort(descending=True, stable=True).indices
        assert first_largest(row).tolist() == stable[:1].tolist()
        for k in (1, 2, 7, 40, 900, 4000, vocab_size, vocab_size + 5):
            assert torch.equal(top_ids(row, k), stable[:k])


@pytest.mark.parametrize("vocab_size", [4097, 4223, 5000])
def test_the_largest_are_found_in_the_last_chunk_too(vocab_size: int) -> None:
    from paceline.core.rows import first_largest, ids_at_least, top_ids

    for first, second in ((vocab_size - 1, vocab_size - 2), (vocab_size - 1, 3), (4096, 4095), (4095, vocab_size - 1)):
        row = torch.randn(vocab_size, generator=torch.Generator().manual_seed(first))
        row[[first, second]] = torch.tensor([51.0, 50.0])
        assert ids_at_least(row, 40).tolist() == sorted((first, second))
        assert first_largest(row).tolist() == [first] and top_ids(row, 2).tolist() == [first, second]


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0},
        {"temperature": 1.3, "top_p": 0.9},
        {"top_p": 1e-9},
        {"top_k": 7},
        {"top_k": 50, "top_p": 0.5, "min_p": 0.01},
        {"min_p": 0.05},
        {"min_p": 0.001, "top_p": 0.8},
        {"min_p": 1.0},
        {"temperature": 1e-6},
    ],
    ids=str,
)
@pytest.mark.parametrize("vocab_size", [40, 5000])
def test_filters_by_their_definition(changes: dict[str, float], vocab_size: int) -> None:
    """temperature, min-p, top-k, top-p one after the other on a sorted row, ties to the lowest id."""
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        logits = (4 * torch.randn(vocab_size, generator=generator)).to(torch.bfloat16)
        params = SamplingParams(**changes)  # type: ignore[arg-type]
        weights = token_weights(logits, params, History(()))
        order = logits.sort(descending=True, stable=True).indices.tolist()
        if params.is_greedy:
            assert weights.nonzero().flatten().tolist() == order[:1]
            continue
        expected = [math.exp((float(logits[i]) - float(logits[order[0]])) / params.temperature) for i in order]
        kept = [(i, w) for i, w in zip(order, expected, strict=True) if w >= params.min_p]
        kept = kept[: params.top_k] if params.top_k > 0 else kept
        mass, before, final = params.top_p * sum(w for _, w in kept), 0.0, []
        for i, w in kept:
            if params.top_p < 1 and before >= mass:
                break
            final.append((i, w))
            before += w
        final = [(i, w) for i, w in final if w > 0]
        assert weights.nonzero().flatten().tolist() == sorted(i for i, _ in final)
        for i, w in final:
            assert math.isclose(float(weights[i]), w, rel_tol=1e-12)
