"""Whatever pays, step by step: several methods, and a policy that chooses among them.

Idea: copying pays on one text, a draft model on another, nothing on a third, and a busy machine changes the account.
All members observe every token, so each can draft at once when its turn comes. Lookups are asked first, for nothing:
what they found, measured costs and running acceptance tell the policy which method drafts how much for each sequence,
or that none does. The policy is the engine's; without one the members draft in order, as `composite` has them.
Cost a step: the lookups, and the member chosen. Pays by design: a member that doesn't gets a probe now and then.
Lossless under every rule its members are lossless under: what is looked at before the choice was drawn without chance,
and what is drawn by chance was settled in method and number before and is never dropped.
Sources: Leviathan et al. 2211.17192, §3.4 (the account); Liu et al., TurboSpec, 2406.14066 (goodput).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from paceline.core.proposal import Proposal
from paceline.drafters.base import Drafter, SequenceView, create_drafter
from paceline.drafters.composite import CompositeDrafter, Member, member_configs, union
from paceline.drafters.config import SpeculativeConfig, auto_draft_tokens
from paceline.drafters.policy import Policy
from paceline.drafters.registry import find
from paceline.models.head_search import find_heads
from paceline.models.load import LoadedModel
from paceline.models.shipped import evaluated_acceptance, shipped_heads

LOOKUPS = ("suffix", "ngram")
ALWAYS = ("suffix",)  # it needs no model; beside it `ngram` took 3 % of the time of a small target, and drafted no more
BY_HEADS = ("eagle3", "medusa", "early_exit")  # best first: every member costs what it observes


class AutoDrafter(CompositeDrafter):
    """Members by name, of whom `policy` chooses; `lookups` are asked before.

    on_trial: members that nobody asked for, and how often each position of their chains was accepted when they were
    made. A head costs something even while it sits out: whoever knows what it costs here may `leave_out` one.
    """

    name = "auto"

    def __init__(
        self,
        members: Sequence[Member],
        lookups: Sequence[str] = LOOKUPS,
        on_trial: Mapping[str, Sequence[float]] = MappingProxyType({}),
    ) -> None:
        super().__init__(members)
        self.by_name = {member.drafter.name: member for member in members}
        self.lookups = tuple(name for name in self.by_name if name in lookups)
        self.on_trial = on_trial
        self.policy: Policy | None = None

    def leave_out(self, name: str) -> None:
        """Do without a member, before anything is drafted."""
        self.members = tuple(member for member in self.members if member.drafter.name != name)
        self.by_name = {own: member for own, member in self.by_name.items() if own != name}
        self.lookups = tuple(own for own in self.lookups if own != name)
        self.needs = union(member.drafter for member in self.members)

    def propose(self, sequences: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        if self.policy is None:
            return super().propose(sequences, budgets)
        self.begin_pass(sequences)
        asked_at = self.policy.clock()
        found = self._looked_up(self.policy, sequences, budgets)
        if not found and len(self.lookups) == len(self.members):
            self.policy.rested(sequences)
            return [Proposal.empty()] * len(sequences)
        choices = self.policy.choose(sequences, budgets, found, asked_at)
        chosen: dict[str, list[int]] = {}
        for i, choice in enumerate(choices):
            if choice.method is not None and choice.budget > 0:
                chosen.setdefault(choice.method, []).append(i)
        proposals = [Proposal.empty() for _ in sequences]
        for method, indices in chosen.items():
            limits = [min(choices[i].budget, budgets[i]) for i in indices]
            if method in found:
                drafts = [_first(found[method][i], limit) for i, limit in zip(indices, limits, strict=True)]
            else:
                drafts = self._timed(self.policy, method, [sequences[i] for i in indices], limits)
            for i, draft in zip(indices, drafts, strict=True):
                proposals[i] = draft
                self.credit(sequences[i], draft, self.by_name[method].drafter)
        return proposals

    def _looked_up(
        self, policy: Policy, sequences: Sequence[SequenceView], budgets: Sequence[int]
    ) -> dict[str, list[Proposal]]:
        """What each lookup would draft: nothing for a sequence whose lookups rest."""
        asked = [i for i, sequence in enumerate(sequences) if policy.asks_lookups(sequence)]
        if not asked or not self.lookups:
            return {}
        whom, limits = [sequences[i] for i in asked], [budgets[i] for i in asked]
        found = {name: self._ask(self.by_name[name], whom, limits) for name in self.lookups}
        if len(asked) < len(sequences):
            for name, drafts in found.items():
                by_place = dict(zip(asked, drafts, strict=True))
                found[name] = [by_place.get(i, Proposal.empty()) for i in range(len(sequences))]
        return found

    def _timed(
        self, policy: Policy, method: str, sequences: Sequence[SequenceView], budgets: Sequence[int]
    ) -> list[Proposal]:
        start = policy.clock()
        drafts = self._ask(self.by_name[method], sequences, budgets)
        policy.drafted(method, sequences, budgets, drafts, policy.clock() - start)
        return drafts

    def _ask(self, member: Member, sequences: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        return member.drafter.propose(sequences, [min(budget, member.num_draft_tokens) for budget in budgets])

    def restore(self, sequence: SequenceView, snapshot: Any, length: int) -> None:
        super().restore(sequence, snapshot, length)
        if self.policy is not None:
            self.policy.begin(sequence, 0 if snapshot is None else length)

    def fork(self, sequence: SequenceView, child: SequenceView) -> None:
        super().fork(sequence, child)
        if self.policy is not None:
            self.policy.begin(child, len(child.token_ids) - 1)

    def release(self, sequence: SequenceView) -> None:
        if self.policy is not None:
            self.policy.forget(sequence)
        super().release(sequence)


def _first(draft: Proposal, count: int) -> Proposal:
    return draft if len(draft) <= count else draft.prune(range(count))


def create(config: SpeculativeConfig, target: LoadedModel) -> Drafter:
    on_trial: dict[str, Sequence[float]] = {}
    if config.methods is None:
        if config.model is None:
            on_trial = _own(target)
        named = (*ALWAYS, *on_trial) if config.model is None else (*ALWAYS, _kind(config.model, target))
        members = tuple(SpeculativeConfig.from_dict({"method": name, **auto_draft_tokens(name)}) for name in named)
        config = replace(config, methods=members)
    if not any("draft_cache_tokens" in find(member.method).options for member in config.methods or ()):
        config = replace(config, draft_cache_tokens=None)  # how much room there is, whoever may take it
    configs = member_configs(config, least=1, before_others={})
    members_ready = [Member(create_drafter(m, target), m.num_speculative_tokens) for m in configs]
    return AutoDrafter(members_ready, [m.method for m in configs if find(m.method).lookup], on_trial)


def _own(target: LoadedModel) -> dict[str, Sequence[float]]:
    """The method of the best head that comes with the package for this target, if there is one, and its acceptance."""
    heads = shipped_heads(target)
    return {name: evaluated_acceptance(heads[name]) for name in [name for name in BY_HEADS if name in heads][:1]}


def _kind(model: str, target: LoadedModel) -> str:
    """The method that a model drafts by: a head's, if it is one."""
    folder = Path(model).expanduser()
    heads = {head.path.resolve(): head.kind for head in find_heads([folder], target.config)}
    return heads.get(folder.resolve(), "draft_model")
