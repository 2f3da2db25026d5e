"""A layer's halves in one native call each: bit for bit what the single operators make of them."""

import copy

import pytest
import torch
from tiny import prompt, tiny_decoder

from paceline.models.decoder import Decoder, LayerStep, Segment
from paceline.ops.fused_layer import fuse
from paceline.ops.linear import Linear
from paceline.ops.native import library
from paceline.ops.twins import TorchOperators

LIBRARY = library.load()
if isinstance(LIBRARY, library.Missing):
    pytest.skip(f"native operators {LIBRARY.reason}", allow_module_level=True)
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3")


def composed(decoder: Decoder) -> Decoder:
    twin = copy.copy(decoder)
    twin.fused = [None] * len(decoder.layers)
    return twin


def states(decoder: Decoder, layers: list[LayerStep] | None = None) -> list[torch.Tensor]:
    """Of a prompt, then of a tree behind it beside another sequence's chain; and every key and value."""
    pool = decoder.new_pool(320)
    one, two = pool.new_sequence(), pool.new_sequence()
    one.reserve(75)
    two.reserve(9)
    for store in (pool.keys, pool.values):
        store.zero_()
    first = decoder.forward([Segment(one, prompt(70))], layers=layers).hidden
    one.commit(range(70))
    second = decoder.forward(
        [Segment(one, prompt(5, seed=1), [-1, 0, 0, 1, 2]), Segment(two, prompt(9, seed=2))], layers=layers
    ).hidden
    return [first, second, pool.keys.clone(), pool.values.clone()]


@pytest.mark.parametrize("level", LIBRARY.levels)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_bits_are_those_of_the_single_operators(family: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.VARIABLE, level)
    decoder = tiny_decoder(family, dtype=torch.bfloat16)
    assert None not in decoder.fused
    for layers in (None, [LayerStep(0, mlp=False), LayerStep(1, attention=False), LayerStep(2)]):
        for ours, theirs in zip(states(decoder, layers), states(composed(decoder), layers), strict=True):
            assert torch.equal(ours, theirs)


def test_only_layers_that_are_native_throughout_are_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = tiny_decoder(dtype=torch.bfloat16)
    layer = copy.copy(decoder.layers[0])
    assert fuse(layer, decoder.operators) is not None
    assert fuse(layer, TorchOperators(torch.bfloat16)) is None
    object.__setattr__(layer, "down", Linear(layer.down.weight))
    assert fuse(layer, decoder.operators) is None
    assert tiny_decoder(dtype=torch.float32).fused == [None] * 3
    monkeypatch.setenv(library.VARIABLE, "torch")
    assert tiny_decoder(dtype=torch.bfloat16).fused == [None] * 3
