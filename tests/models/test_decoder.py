"""The decoder against transformers, family by family, and against itself however its rows are arranged."""

import pytest
import tiny
import torch
from transformers import PreTrainedModel

from paceline.models.cache import SequenceCache
from paceline.models.decoder import Decoder, LayerStep, Segment
from paceline.ops.native import library

TOKENS = tiny.prompt(150)
NATIVE = library.load()
# bf16 by torch's operators, and by native ones of every level that this machine has
EVERY_SET = ["torch", *(() if isinstance(NATIVE, library.Missing) else NATIVE.levels)]


@pytest.fixture
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """A precision, or bf16 with the set of operators that is named."""
    if isinstance(request.param, str):
        monkeypatch.setenv(library.VARIABLE, request.param)
        return torch.bfloat16
    return request.param


def run(decoder: Decoder, cache: SequenceCache, tokens: list[int]) -> torch.Tensor:
    out = decoder.forward([Segment(cache, tokens)])
    cache.commit(range(len(tokens)))
    return decoder.logits(out.hidden)


def reference(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_logits_equal_transformers(family: str) -> None:
    model = tiny.hf_model(tiny.hf_config(family))
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, None)):
        expected = reference(model.to(dtype), TOKENS)
        decoder = tiny.decoder_of(model, dtype)
        got = run(decoder, decoder.new_pool(512).new_sequence(), TOKENS)
        allowed = tolerance or 1e-5 * expected.abs().max().item()
        assert (got - expected).abs().max().item() <= allowed


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_logits_equal_transformers_where_the_width_is_no_square(family: str) -> None:
    """Gemma scales its embeddings by the root of it."""
    model = tiny.hf_model(tiny.hf_config(family, hidden_size=72))
    decoder = tiny.decoder_of(model, torch.float64)
    got = run(decoder, decoder.new_pool(512).new_sequence(), TOKENS)
    assert (got - reference(model, TOKENS)).abs().max().item() <= 1e-9


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_tiny_models_look_at_their_context(family: str) -> None:
    """Without this the other tests could not see a fault of cache, mask or positions."""
    model = tiny.hf_model(tiny.hf_config(family))
    other = [(TOKENS[0] + 1) % 256, *TOKENS[1:]]
    near = 15 if family in ("mistral", "gemma3") else 40  # within the sliding window
    moved = (reference(model, TOKENS)[near] - reference(model, other)[near]).abs().max().item()
    assert moved > 1e-2


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        tiny.LLAMA3_ROPE,
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.0},
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
            "beta_fast": 16.0,
        },
    ],
    ids=lambda rope: f"{rope['rope_type']}-{len(rope)}",
)
def test_scaled_rope_equals_transformers(rope: dict[str, object]) -> None:
    model = tiny.hf_model(tiny.hf_config("llama", rope_parameters={"rope_theta": 10000.0, **rope}))
    decoder = tiny.decoder_of(model, torch.float64)
    rope = decoder.layers[0].attention.rope
    inv_freq, factor = rope.frequencies, rope.factor
    assert torch.equal(inv_freq, model.model.rotary_emb.inv_freq.float())
    assert factor == model.model.rotary_emb.attention_scaling
    got = run(decoder, decoder.new_pool(512).new_sequence(), TOKENS)
    assert (got - reference(model, TOKENS)).abs().max().item() <= 1e-9


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(4, 4, 16), (4, 1, 80), (7, 1, 16), (1, 1, 96), (9, 3, 256)]
)
def test_head_counts_and_widths(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """Every key head its own query head, all query heads one key head, and what lies between."""
    shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    model = tiny.hf_model(tiny.hf_config("qwen3", **shape))
    decoder = tiny.decoder_of(model, dtype)
    pool = decoder.new_pool(1024)
    got = run(decoder, pool.new_sequence(), TOKENS)
    if dtype == torch.float64:
        assert (got - reference(model, TOKENS)).abs().max().item() <= 1e-9
    single = pool.new_sequence()
    assert torch.equal(torch.cat([run(decoder, single, [token]) for token in TOKENS[:70]]), got[:70])


def test_attention_and_mlp_biases_are_applied() -> None:
    model = tiny.hf_model(tiny.hf_config("llama", attention_bias=True, mlp_bias=True))
    decoder = tiny.decoder_of(model, torch.float64)
    got = run(decoder, decoder.new_pool(512).new_sequence(), TOKENS)
    assert (got - reference(model, TOKENS)).abs().max().item() <= 1e-9


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *EVERY_SET], ids=str, indirect=True)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_bits_do_not_depend_on_how_rows_are_grouped(family: str, dtype: torch.dtype) -> None:
    decoder = tiny.tiny_decoder(family, dtype=dtype)
    pool = decoder.new_pool(4096)
    single = pool.new_sequence()
    expected = torch.cat([run(decoder, single, [token]) for token in TOKENS])
    for sizes in ([150], [64, 64, 22], [1, 40, 30, 79], [7] * 21 + [3]):
        cache, got, start = pool.new_sequence(), [], 0
        for size in sizes:
            got.append(run(decoder, cache, TOKENS[start : start + size]))
            start += size
        assert torch.equal(torch.cat(got), expected), sizes


@pytest.mark.parametrize("dtype", [torch.float64, *EVERY_SET], ids=str, indirect=True)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_tree_nodes_equal_their_linearised_paths(family: str, dtype: torch.dtype) -> None:
    """Bit for bit, at contexts before, at and across a block border; the accepted path then is a plain prefix."""
    decoder = tiny.tiny_decoder(family, dtype=dtype)
    pool = decoder.new_pool(4096)
    ids = tiny.prompt(40, seed=3)
    parents = [-1, 0, 0, 1, 1, 2, 3, 6, 7, 0, *range(9, 39)]  # a bush, then a chain of 30 from node 9
    for length in (1, 58, 64, 90):
        prefix = pool.new_sequence()
        run(decoder, prefix, TOKENS[:length])
        out = decoder.forward([Segment(prefix, ids, parents)])
        logits = decoder.logits(out.hidden)
        for node in (0, 2, 5, 8, 9, 25, 39):
            path = path_to(parents, node)
            line = prefix.fork()
            expected = run(decoder, line, [ids[row] for row in path])
            assert torch.equal(logits[node], expected[-1]), (length, node)
        path = path_to(parents, 39)
        prefix.commit(path)
        cold = pool.new_sequence()
        accepted = TOKENS[:length] + [ids[row] for row in path]
        run(decoder, cold, accepted)
        assert torch.equal(rows_of(prefix), rows_of(cold))
        assert torch.equal(run(decoder, prefix, TOKENS[:9]), run(decoder, cold, TOKENS[:9]))


def path_to(parents: list[int], node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def rows_of(cache: SequenceCache) -> torch.Tensor:
    blocks, offsets = cache.slots(0, cache.length)
    return torch.stack([store[:, blocks, :, offsets] for store in (cache.pool.keys, cache.pool.values)])


def test_sequences_in_one_forward_do_not_touch_one_another() -> None:
    decoder = tiny.tiny_decoder("qwen3", dtype=torch.bfloat16)
    pool = decoder.new_pool(4096)
    lengths = (3, 70, 64, 130)
    caches = []
    for n, length in enumerate(lengths):
        cache = pool.new_sequence()
        run(decoder, cache, tiny.prompt(length, seed=n))
        caches.append(cache)
    steps = [[5], [6, 7, 8, 9, 10], [11, 12], [13] * 40]
    alone = [run(decoder, cache.fork(), step) for cache, step in zip(caches, steps, strict=True)]
    out = decoder.forward([Segment(cache, step) for cache, step in zip(caches, steps, strict=True)])
    assert torch.equal(decoder.logits(out.hidden), torch.cat(alone))


def test_rejected_rows_change_nothing() -> None:
    """What a rejected draft left in its slots must not be read: overwrite it with 1000 and compare."""
    decoder = tiny.tiny_decoder("llama", dtype=torch.float32)
    pool = decoder.new_pool(512)
    cache = pool.new_sequence()
    run(decoder, cache, TOKENS[:60])
    decoder.forward([Segment(cache, TOKENS[60:70])])
    cache.commit([0, 1])
    blocks, offsets = cache.slots(62, 8)
    clean = run(decoder, cache.fork(), TOKENS[:3])
    pool.keys[:, blocks, :, offsets] = 1e3
    pool.values[:, blocks, :, offsets] = 1e3
    assert torch.equal(run(decoder, cache, TOKENS[:3]), clean)


def test_layer_subsets_and_resumption() -> None:
    """[0, 2) then [2, L) from the hidden states is the whole; a half layer is neither nothing nor all."""
    decoder = tiny.tiny_decoder("llama", dtype=torch.float64)
    pool = decoder.new_pool(512)
    whole = decoder.forward([Segment(pool.new_sequence(), TOKENS[:50])], taps=(1, 2))
    cache = pool.new_sequence()
    early = decoder.forward([Segment(cache, TOKENS[:50])], layers=[LayerStep(0), LayerStep(1)])
    assert torch.equal(early.hidden, whole.taps[1])
    late = decoder.forward([Segment(cache, TOKENS[:50])], layers=[LayerStep(2)], start=early.hidden)
    assert torch.equal(late.hidden, whole.hidden)
    assert torch.equal(whole.taps[2], whole.hidden)
    attention_only = decoder.forward([Segment(pool.new_sequence(), TOKENS[:50])], layers=[LayerStep(0, mlp=False)])
    mlp_only = decoder.forward([Segment(pool.new_sequence(), TOKENS[:50])], layers=[LayerStep(0, attention=False)])
    both = decoder.forward([Segment(pool.new_sequence(), TOKENS[:50])], layers=[LayerStep(0)])
    assert not torch.equal(attention_only.hidden, both.hidden)
    assert not torch.equal(mlp_only.hidden, both.hidden)


def test_native_operators_yield_torchs_logits_but_for_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    for family in tiny.FAMILIES:
        logits = []
        for name in EVERY_SET:
            monkeypatch.setenv(library.VARIABLE, name)
            decoder = tiny.tiny_decoder(family, dtype=torch.bfloat16)
            assert (decoder.operators.name == "torch") == (name == "torch")
            logits.append(run(decoder, decoder.new_pool(512).new_sequence(), TOKENS).float())
        for theirs in logits[1:]:
            assert (theirs - logits[0]).std() < 0.06 * logits[0].std()
