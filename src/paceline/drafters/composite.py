"""Several methods in order: each sequence takes the first draft that is not empty.

Idea: a lookup costs nothing and is long and right where text recurs; elsewhere a model drafts. Every member observes
every token, so each is ready when its turn comes, and a member is called once a step, for the sequences that are still
without a draft. Cost a step: its members', as far as they are asked. Pays where some of the text recurs.
Lossless under every rule its members are lossless under. Whether a member drafts at all is settled by the context (text
that recurs, room in the draft model's context, a token that a constraint allows) before it draws its first token: the
choice never depends on a sampled value, and no sampled token is dropped.
Source: the hybrid of suffix decoding and EAGLE in Oliaro et al. 2411.04975; ArcticInference.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.core.proposal import Proposal
from paceline.drafters.base import NO_FEATURES, Drafter, Features, Needs, SequenceView, create_drafter
from paceline.drafters.config import MAX_DRAFT_TOKENS, SpeculativeConfig
from paceline.drafters.registry import OF_METHODS, find, names
from paceline.errors import PacelineError
from paceline.models.load import LoadedModel
from paceline.values import shown

# Before another method, suffix must expect about what a model's draft brings: a match of one token is too easily found.
BEFORE_OTHERS = {"suffix_decoding_min_score": 2.0}


@dataclass(frozen=True, slots=True)
class Member:
    """A drafter, and the most tokens it drafts whatever the budget."""

    drafter: Drafter
    num_draft_tokens: int = MAX_DRAFT_TOKENS


class CompositeDrafter:
    """Asks `members` in order. Raises PacelineError if they cannot share a target pass."""

    name = "composite"

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = tuple(members)
        self.needs = union(member.drafter for member in members)
        self._drafted_by: dict[int, Drafter] = {}  # whose proposal a sequence's next pass verifies

    def observe(self, sequence: SequenceView, tokens: Sequence[int], features: Features) -> None:
        drafted_by = self._drafted_by.pop(sequence.request_id, None)
        for member in self.members:
            drafter = member.drafter
            drafter.observe(sequence, tokens, share(features, drafter.needs, drafter is drafted_by))

    def propose(self, sequences: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        self.begin_pass(sequences)
        proposals = [Proposal.empty() for _ in sequences]
        waiting = [i for i, budget in enumerate(budgets) if budget > 0]
        for member in self.members:
            if not waiting:
                break
            limits = [min(budgets[i], member.num_draft_tokens) for i in waiting]
            drafts = member.drafter.propose([sequences[i] for i in waiting], limits)
            for i, draft in zip(waiting, drafts, strict=True):
                if len(draft):
                    proposals[i] = draft
                    self.credit(sequences[i], draft, member.drafter)
            waiting = [i for i in waiting if not len(proposals[i])]
        return proposals

    def begin_pass(self, sequences: Sequence[SequenceView]) -> None:
        """Nobody has drafted yet: what is left is of a pass that was interrupted."""
        for sequence in sequences:
            self._drafted_by.pop(sequence.request_id, None)

    def credit(self, sequence: SequenceView, draft: Proposal, drafter: Drafter) -> None:
        """The sequence's next pass verifies what `drafter` has drafted."""
        if len(draft):
            self._drafted_by[sequence.request_id] = drafter

    def snapshot(self, sequence: SequenceView) -> Any:
        """None unless every member that lives on the target's features has a state: a hit must serve them all."""
        states: list[Any] = []
        try:
            for member in self.members:
                states.append(member.drafter.snapshot(sequence))
        except BaseException:
            self.discard(states)
            raise
        lacking = any(s is None and m.drafter.needs.hidden_layers for s, m in zip(states, self.members, strict=True))
        if lacking or all(state is None for state in states):
            self.discard(states)
            return None
        return tuple(states)

    def restore(self, sequence: SequenceView, snapshot: Any, length: int) -> None:
        self._drafted_by.pop(sequence.request_id, None)
        for i, member in enumerate(self.members):
            member.drafter.restore(sequence, None if snapshot is None else snapshot[i], length)

    def discard(self, snapshot: Any) -> None:
        for member, state in zip(self.members, snapshot or (), strict=False):
            if state is not None:
                member.drafter.discard(state)

    def mend(self, snapshots: Sequence[Any]) -> None:
        for i, member in enumerate(self.members):
            member.drafter.mend([states[i] for states in snapshots if states[i] is not None])

    def fork(self, sequence: SequenceView, child: SequenceView) -> None:
        for member in self.members:
            member.drafter.fork(sequence, child)

    def release(self, sequence: SequenceView) -> None:
        self._drafted_by.pop(sequence.request_id, None)
        for member in self.members:
            member.drafter.release(sequence)


def union(drafters: Iterable[Drafter]) -> Needs:
    """All that the drafters need of a pass. Raises PacelineError for early exits at different layers."""
    all_needs: list[Needs] = []
    exits: dict[int, str] = {}
    for drafter in drafters:
        all_needs.append(drafter.needs)
        if drafter.needs.early_layer is not None:
            exits.setdefault(drafter.needs.early_layer, drafter.name)
    if len(exits) > 1:
        (one, first), (other, second) = list(exits.items())[:2]
        raise PacelineError(
            f"composite: {shown(first)} exits at layer {one} and {shown(second)} at layer {other}",
            hint="let them exit at the same layer, or leave one out",
        )
    return Needs(
        hidden_layers=tuple(sorted({layer for needs in all_needs for layer in needs.hidden_layers})),
        top_tokens=max((needs.top_tokens for needs in all_needs), default=0),
        scratch_argmax=any(needs.scratch_argmax for needs in all_needs),
        early_layer=next(iter(exits), None),
        trees=any(needs.trees for needs in all_needs),
    )


def share(features: Features, needs: Needs, drafted: bool) -> Features:
    """What one member asked for, and no more; scratch nodes are those of the member that `drafted`."""
    if not needs.features:
        return NO_FEATURES
    top = features.top_tokens
    return Features(
        {layer: features.hidden[layer] for layer in needs.hidden_layers},
        None if top is None or not needs.top_tokens else top[:, : needs.top_tokens],
        features.scratch_argmax if needs.scratch_argmax and drafted else None,
    )


def create(config: SpeculativeConfig, target: LoadedModel) -> Drafter:
    members = member_configs(config)
    return CompositeDrafter([Member(create_drafter(m, target), m.num_speculative_tokens) for m in members])


def member_configs(
    config: SpeculativeConfig, least: int = 2, before_others: Mapping[str, Any] = BEFORE_OTHERS
) -> list[SpeculativeConfig]:
    """Each member's configuration: its own options, then the whole's. Raises PacelineError for one nobody takes.

    `least`: how many there must be. `before_others`: options of all but the last, unless others are given.
    """
    members, whole = config.methods, repr(config.method)
    if members is None:
        raise PacelineError(f"method {whole} needs methods", hint='for instance "methods": ["suffix", "draft_model"]')
    named = [member.method for member in members]
    for name in named:
        if name not in (known := names()):
            raise PacelineError(
                f"methods holds the unknown method {shown(name)}", hint=f"one of: {', '.join(sorted(known))}"
            )
        if name in ("none", *OF_METHODS):
            raise PacelineError(f"methods holds {shown(name)}, which is no method to draft with", hint="leave it out")
        if named.count(name) > 1:
            raise PacelineError(f"methods holds {shown(name)} twice", hint="name each method once")
    if len(members) < least:
        raise PacelineError(
            f"methods holds {'one' if members else 'no'} method, and {whole} needs {('one', 'two')[least - 1]} or more",
            hint=f'"method": "{named[0]}" uses one alone' if named else '"methods": ["suffix", "draft_model"]',
        )
    options = {name: getattr(config, name) for name in sorted(config.options() - {"methods"})}
    for option in options:
        if not any(
            option in find(name).options and option not in m.options() for name, m in zip(named, members, strict=True)
        ):
            raise PacelineError(f"no method of {', '.join(named)} takes {option} from {whole}", hint="leave it out")
    # who could do without a model leaves it to those who need one
    waiting = any(find(m.method).needs_model and "model" not in m.options() for m in members)
    last = len(members) - 1
    return [_fill_in(m, options if i == last else {**before_others, **options}, waiting) for i, m in enumerate(members)]


def _fill_in(member: SpeculativeConfig, options: dict[str, Any], model_is_awaited: bool) -> SpeculativeConfig:
    method = find(member.method)
    taken = method.options - member.options()
    if model_is_awaited and not method.needs_model:
        taken -= {"model"}
    return replace(member, **{name: value for name, value in options.items() if name in taken})
