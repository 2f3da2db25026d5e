"""The protocol that every drafting method implements.

A drafter proposes; the engine verifies, commits and tells every drafter what was committed. Nothing a drafter does can
change an output, only how soon it comes.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from paceline.core.drafting import DraftSampler
from paceline.core.proposal import Proposal
from paceline.core.verify import Rule
from paceline.drafters.config import SpeculativeConfig
from paceline.drafters.registry import find
from paceline.errors import PacelineError
from paceline.models.cache import SequenceCache
from paceline.models.decoder import Decoder, EarlyRows, ForwardOutput, Segment
from paceline.models.load import LoadedModel


@dataclass(frozen=True, slots=True)
class Needs:
    """What a drafter asks of the target's passes; the engine checks it once, when it is built.

    `hidden_layers`: output of these layers at every committed token (−1: the state that the output head reads).
    `top_tokens`: the target's k likeliest tokens at every kept node; `scratch_argmax`: its arg-max at scratch nodes.
    `early_layer`: proposals carry hidden states after this many layers, and verification goes on from them.
    `trees`: proposals may branch; a rule that takes chains alone is refused with this drafter.
    `looks_ahead`: a chain that ends before its budget has cost the drafting of one token more than it holds.
    """

    hidden_layers: tuple[int, ...] = ()
    top_tokens: int = 0
    scratch_argmax: bool = False
    early_layer: int | None = None
    trees: bool = False
    looks_ahead: bool = False

    @property
    def features(self) -> bool:
        """Whether the drafter lives on what the target computed, and must have seen it for every token."""
        return bool(self.hidden_layers or self.top_tokens or self.scratch_argmax or self.early_layer is not None)


NOTHING = Needs()


@dataclass(frozen=True, slots=True)
class Features:
    """What the target computed at the observed tokens, as far as `Needs` asked for it.

    hidden[layer]: [n, d]; top_tokens: [n, k]; scratch_argmax: [num_scratch] of the step's scratch nodes.
    """

    hidden: Mapping[int, torch.Tensor] = field(default_factory=dict)
    top_tokens: torch.Tensor | None = None
    scratch_argmax: torch.Tensor | None = None


NO_FEATURES = Features()


class SequenceView(Protocol):
    """What a drafter may see of a request: one choice of it, where `n` asked for several."""

    @property
    def request_id(self) -> int:
        """The same for its whole life, never used again."""

    @property
    def token_ids(self) -> Sequence[int]:
        """Prompt and output. The last token is committed but the target has not processed it yet: drafts follow it."""

    @property
    def num_prompt_tokens(self) -> int:
        """The first so many of `token_ids` are the prompt."""

    @property
    def draft_sampler(self) -> DraftSampler:
        """How to pick tokens from draft logits after `token_ids`: a drafter never decides that itself."""

    @property
    def private_drafts(self) -> bool:
        """No other request may be drafted for from this one's text, nor this one from another's."""

    @property
    def cache(self) -> SequenceCache:
        """The target's, with rows for all `token_ids` but the last. Drafts may lie behind them (`beyond`), no more."""


class Drafter(Protocol):
    """One drafting method, for all running requests.

    The engine calls `observe` for **every** token the target has processed and kept: prompt chunks, steps without
    speculation, tokens drafted by another method. So a drafter can sit out and come back, and after full acceptance
    its own last token is simply the next thing it observes. It may lag and catch up in `propose`.

    An exception costs speculation, never the request: the engine asks again, sequence by sequence, to find whose fault
    it was, so `propose` must stand being called again after it has raised. `CacheFull` is no fault and means no draft.
    """

    name: str
    needs: Needs

    def observe(self, sequence: SequenceView, tokens: Sequence[int], features: Features) -> None:
        """`tokens` [n] follow what was observed before; `features` holds one row for each."""

    def propose(self, sequences: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        """One proposal a sequence, of at most `budgets[i]` nodes; an empty one is always allowed."""

    def snapshot(self, sequence: SequenceView) -> Any:
        """The drafter's state after the observed tokens, for a prefix cache; None if it has none worth keeping."""

    def restore(self, sequence: SequenceView, snapshot: Any, length: int) -> None:
        """Begin `sequence` with the first `length` tokens observed already, as `snapshot` (or longer) knew them.

        Also for a running one that lost its place: with length 0, it will be observed from its start again.
        """

    def discard(self, snapshot: Any) -> None:
        """No sequence will begin with `snapshot` any more: give back what it holds."""

    def mend(self, snapshots: Sequence[Any]) -> None:
        """After an interruption (Ctrl-C) at whatever line of whatever call: make whole what was cut short.

        `snapshots` are all that is left of what was handed out. Where the call was of one sequence alone, as all but
        `propose` are, that sequence has been released.
        """

    def fork(self, sequence: SequenceView, child: SequenceView) -> None:
        """Begin `child` with all that is known of `sequence`."""

    def release(self, sequence: SequenceView) -> None:
        """The request has ended: forget it. Allowed for a sequence that was never observed.

        After a stop string that came to light late, `token_ids` may be shorter than what was observed.
        """


DrafterFactory = Callable[[SpeculativeConfig, LoadedModel], Drafter]
"""What `Method.factory` names. Raises PacelineError for options that cannot be."""


def create_drafter(config: SpeculativeConfig, target: LoadedModel) -> Drafter:
    """The drafter that a configuration names. Raises PacelineError for an unknown method or a foreign option."""
    config.check_options()
    module, attribute = find(config.method).factory.split(":")
    factory: DrafterFactory = getattr(importlib.import_module(module), attribute)
    return factory(config, target)


def check_rule(rule: Rule, drafter: Drafter) -> None:
    """Refuse a rule that takes chains alone with a drafter of trees. Raises PacelineError."""
    if drafter.needs.trees and not rule.takes_trees:
        raise PacelineError(
            f"verification rule {rule.name!r} takes chains, and method {drafter.name!r} drafts trees",
            hint="use the rule 'coupled' or 'standard', or a method that drafts chains",
        )


def draft_budget(drafter: Drafter, num_draft_tokens: int, num_left: int) -> int:
    """Nodes that are worth drafting before a request's last `num_left` tokens, of `num_draft_tokens` at most.

    The last token of all is the target's own pass's to yield. A chain is of no use beyond the tokens before it; of a
    tree that holds for its depth alone, since its nodes stand for one another.
    """
    if num_left < 2:
        return 0
    return num_draft_tokens if drafter.needs.trees else min(num_draft_tokens, num_left - 1)


def check_needs(drafter: Drafter, num_layers: int) -> None:
    """Refuse a drafter that wants to see what a target of so many layers has not. Raises PacelineError."""
    needs = drafter.needs
    strange = [layer for layer in needs.hidden_layers if not -1 <= layer < num_layers]
    if needs.early_layer is not None and not 0 < needs.early_layer <= num_layers:
        strange.append(needs.early_layer)
    if strange:
        raise PacelineError(
            f"method {drafter.name!r} needs the hidden states of layer {strange[0]}, the target has {num_layers} layers"
        )


def verification_segment(sequence: SequenceView, proposal: Proposal, needs: Needs) -> Segment:
    """The rows of a step: the last committed token, and the drafted nodes under it."""
    tokens = (sequence.token_ids[-1], *proposal.tokens)
    parents = (-1, *(parent + 1 for parent in proposal.parents))
    early = None
    if needs.early_layer is not None and proposal.hidden is not None:
        early = EarlyRows(needs.early_layer, proposal.hidden)
    return Segment(sequence.cache, tokens, parents, early)


def features(
    target: Decoder,
    needs: Needs,
    out: ForwardOutput,
    rows: Sequence[int],
    logits: torch.Tensor | None = None,
    proposal: Proposal | None = None,
) -> Features:
    """What a drafter asked to see of a pass, at the rows kept; without `logits` [T, V] hidden states alone."""
    if not needs.features:
        return NO_FEATURES
    index = torch.tensor(list(rows), device=out.hidden.device)
    hidden = {
        layer: (target.final_hidden(out.hidden) if layer < 0 else out.taps[layer])[index]
        for layer in needs.hidden_layers
    }
    if logits is None or proposal is None:
        return Features(hidden)
    most = min(needs.top_tokens, logits.shape[-1])
    top = logits[index].topk(most).indices if most else None  # [n, k]
    scratch = logits[1 + proposal.num_verified :].argmax(-1) if needs.scratch_argmax else None
    return Features(hidden, top, scratch)
