"""What the contract tests stand on: every registered method, and targets with all that drafts for them.

The registry is the list of cases. A method is built from its registry line alone; one that needs a head, from a file in
`HEADS`: without one, all its cases fail.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from drafters import head_files
from engine.running import make_engine, plain
from law_models import TINY_SHAPE
from transformers import PreTrainedModel

from paceline.core.params import SamplingParams
from paceline.decode import Step, decode
from paceline.drafters.base import Drafter, create_drafter
from paceline.drafters.config import SpeculativeConfig
from paceline.drafters.registry import RULES, find, names
from paceline.engine.engine import Engine, RequestOptions
from paceline.models.decoder import Decoder
from paceline.models.load import LoadedModel, load_model

VOCAB = 8  # so few tokens, and so much chance in them, that random heads are right now and then
GREEDY = SamplingParams(temperature=0, max_tokens=10)
SEEDED = SamplingParams(temperature=1.5, top_p=0.95, seed=11, max_tokens=10)
PRIVATE = RequestOptions(private_drafts=True)  # what a request leaves in a pool for others is no state of its own
BUDGET = {"chain": 4, "tree": 12}
TREE = {"chain": "chain", "tree": "static"}


@dataclass(frozen=True)
class Case:
    """A method, drafting one of its shapes."""

    name: str
    shape: str

    def __str__(self) -> str:
        return f"{self.name}, {self.shape}"

    @property
    def budget(self) -> int:
        return BUDGET[self.shape]


def cases() -> list[Case]:
    return [Case(name, shape) for name in names() for shape in find(name).shapes]


CASES = cases()
DRAFTING = [case for case in CASES if case.name != "none"]
UNDECLARED = [Case(name, shape) for name in names() for shape in RULES if shape not in find(name).shapes]
every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_drafting_case = pytest.mark.parametrize("case", DRAFTING, ids=str)


# What a method is configured with

HEADS: dict[str, Callable[[torch.Tensor, tuple[int, ...]], head_files.Head | head_files.Medusa]] = {
    "medusa": lambda embed, layers: head_files.medusa(embed, "original", own_output=False),
    "eagle": lambda embed, layers: head_files.eagle(embed, embed, own_embedding=False),
    "eagle3": lambda embed, layers: head_files.eagle3_speculators(
        embed, draft_vocab=min(64, len(embed) * 7 // 8), layers=layers, fc_norm=True
    ),
}
MEMBERS = {"chain": ["suffix", "draft_model"], "tree": ["ngram", "token_recycling"]}
# Random models are never as sure as the usual threshold wants them to be.
OPTIONS = {
    "layer_skip": {"skip_mlp_layers": [1], "draft_confidence_threshold": 0.2},
    "early_exit": {"draft_confidence_threshold": 0.2},
}


@dataclass(frozen=True)
class Target:
    """A target, its heads in folders under their methods' names, and its draft model's name."""

    model: LoadedModel
    heads: Path
    draft: str

    @property
    def decoder(self) -> Decoder:
        return self.model.decoder

    def drafter(self, case: Case, **options: Any) -> Drafter:
        """A fresh one, from the configuration that a user would write."""
        method = find(case.name)
        values: dict[str, Any] = {"method": case.name, "num_speculative_tokens": case.budget}
        if method.needs == "methods":
            values["methods"] = MEMBERS[case.shape]
        elif len(method.shapes) > 1:
            values["speculative_token_tree"] = TREE[case.shape]
        for name in values.get("methods", [case.name]):
            if find(name).needs_model:
                values["model"] = self._model(name)
        return create_drafter(SpeculativeConfig.from_dict(values | OPTIONS.get(case.name, {}) | options), self.model)

    def _model(self, method: str) -> str:
        if find(method).needs == "model":
            return self.draft
        assert method in HEADS, f"HEADS has no head for method {method!r}"
        return str(self.heads / method)

    def engine(self, drafter: Drafter, case: Case, **options: int) -> Engine:
        return make_engine(self.decoder, {"it": drafter}, num_draft_tokens=case.budget, **options)


# Targets


def with_heads(model: LoadedModel, folder: Path, draft: str) -> Target:
    """With a random head of every kind; of the target's matrices those look at the shapes alone."""
    config = model.config
    embed = torch.empty(config.vocab_size, config.hidden_size, dtype=torch.float64, device="meta")
    layers = tuple(sorted({0, config.num_layers // 2, config.num_layers - 1}))
    for name, head in HEADS.items():
        head(embed, layers).write(folder / name)
    return Target(model, folder, draft)


def tiny_target(folder: Path, family: str, dtype: str, likeness: float = 0.3, **shape: Any) -> Target:
    """A random model, and one like it that drafts: the smaller `likeness`, the more it is."""
    model = tiny.hf_model(tiny.hf_config(family, **shape), dtype=torch.float32)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        calm(model, likeness)
        model.save_pretrained(folder / "target")
        for parameter in model.parameters():
            parameter.add_(0.2 * likeness * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder / "draft")
    return with_heads(load_model(str(folder / "target"), dtype=dtype), folder, str(folder / "draft"))


def calm(model: PreTrainedModel, factor: float) -> None:
    """Let its later layers change less: drafts with a part of them are then right often, and wrong often."""
    sandwiched = model.config.model_type == "gemma3_text"
    last = ("post_attention_layernorm", "post_feedforward_layernorm") if sandwiched else ("o_proj", "down_proj")
    offset = 1.0 if sandwiched else 0.0  # Gemma's norms multiply by 1 + weight
    for name, parameter in model.named_parameters():
        if any(part in name for part in last) and ".layers.0." not in name:
            parameter.copy_(factor * (parameter + offset) - offset)


def llama(folder: Path) -> Target:
    return tiny_target(folder, "llama", "fp32", vocab_size=VOCAB, num_hidden_layers=2)


def gemma3(folder: Path) -> Target:
    """A sliding window of 16 below full attention, norms of queries and keys, norms around every sublayer."""
    kinds = ["sliding_attention", "full_attention"]
    return tiny_target(folder, "gemma3", "bf16", vocab_size=VOCAB, num_hidden_layers=2, layer_types=kinds)


def few_tokens(folder: Path) -> Target:
    """Its answers can be enumerated."""
    return tiny_target(folder, "llama", "fp32", likeness=1.0, vocab_size=3, num_hidden_layers=2, **TINY_SHAPE)


def smollm2(folder: Path) -> Target:
    """The real 135M model, which is its own draft model."""
    return with_heads(load_model("smollm2-135m", dtype="bf16"), folder, "smollm2-135m")


FAMILIES = {"llama": llama, "gemma3": gemma3}


# Texts


def prompt_of(length: int) -> list[int]:
    return tiny.prompt(length, seed=length, vocab_size=VOCAB)


def tokens_of(steps: Sequence[Step]) -> list[int]:
    return [token for step in steps for token in step.token_ids]


def rounds(
    target: Decoder, prompt: Sequence[int], params: SamplingParams, drafter: Drafter, k: int, **options: Any
) -> dict[int, Step]:
    """Every step, by the length of the text before it; together they are plain decoding's tokens, which is asserted."""
    steps = list(decode(target, prompt, params, drafter, k, **options))
    assert tokens_of(steps) == plain(target, prompt, params)
    return dict(zip(_starts(len(prompt), steps), steps, strict=True))


def _starts(length: int, steps: Sequence[Step]) -> Iterator[int]:
    for step in steps:
        yield length
        length += len(step.token_ids)


def longer(params: SamplingParams, max_tokens: int) -> SamplingParams:
    return replace(params, max_tokens=max_tokens)
