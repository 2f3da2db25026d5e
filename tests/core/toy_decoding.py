"""A toy model (logits as a function of the context), toy drafters and constraints, the smallest loop."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.drafting import DraftSampler
from paceline.core.path import PathSampler, TargetWeights
from paceline.core.proposal import Proposal, ProposalBuilder
from paceline.core.rng import GeneratorDraws, Randomness
from paceline.core.rows import ScannedRow
from paceline.core.tree import ROOT
from paceline.core.verify import Rule

Tokens = tuple[int, ...]
Model = Callable[[Tokens], Tensor]
Drafter = Callable[[Tokens, DraftSampler], Proposal]


def toy_model(seed: int, vocab_size: int, scale: float = 2.0) -> Model:
    """Logits [V] in float32 that depend on the last three tokens."""

    def logits(context: Tokens) -> Tensor:
        key = seed
        for token in context[-3:]:
            key = key * 1009 + token + 1
        return torch.randn(vocab_size, generator=torch.Generator().manual_seed(key)) * scale

    return logits


@dataclass
class Run:
    tokens: Tokens
    proposals: list[Proposal]
    accepted: int
    drafted: int


def generate(rule: Rule, path: PathSampler, model: Model, drafter: Drafter, length: int, source_seed: int = 0) -> Run:
    """Draft, verify, advance; what decode.py does, without a model to run. Runs past `length` are cut."""
    context, run = path.history.prompt, Run((), [], 0, 0)
    verify_draws, draft_draws = GeneratorDraws(source_seed), GeneratorDraws(source_seed, stream="draft")
    while len(run.tokens) < length:
        proposal = drafter(context, rule.draft_sampler(path, draft_draws))

        def logits(node: int, context: Tokens = context, proposal: Proposal = proposal) -> ScannedRow:
            return ScannedRow.of(model(context + proposal.path_tokens(node)))

        target = TargetWeights(path, proposal, logits)
        verdict = rule.verify(proposal, target, Randomness(path.noise, verify_draws))
        tokens = verdict.tokens(proposal)
        path, context = path.advance(*tokens), context + tokens
        run.tokens += tokens
        run.proposals.append(proposal)
        run.accepted += len(verdict.path)
        run.drafted += proposal.depth
    run.tokens = run.tokens[:length]
    return run


def no_draft(context: Tokens, sampler: DraftSampler) -> Proposal:
    return Proposal.empty()


def model_draft(model: Model, *widths: int) -> Drafter:
    """Each node of level i gets up to widths[i] children; (1, 1, 1) is a chain of three."""

    def draft(context: Tokens, sampler: DraftSampler) -> Proposal:
        builder = ProposalBuilder()
        level = [(ROOT, context, sampler)]
        for width in widths:
            below = []
            for node, path, at in level:
                drawn = at.draw(model(path), width)
                for child, token in zip(builder.add(node, drawn.tokens, drawn.probs), drawn.tokens, strict=True):
                    below.append((child, (*path, token), at.advance(token)))
            level = below
        return builder.build()

    return draft


def pruned_draft(drafter: Drafter, keep_every: int = 2) -> Drafter:
    """Keeps some nodes of another drafter's trees, by token id: a choice that looks at what was drawn."""

    def draft(context: Tokens, sampler: DraftSampler) -> Proposal:
        proposal = drafter(context, sampler)
        kept: set[int] = set()
        for node, parent in enumerate(proposal.parents):
            if proposal.tokens[node] % keep_every and (parent == ROOT or parent in kept):
                kept.add(node)
        return proposal.prune(kept)

    return draft


def garbage_draft(seed: int, vocab_size: int) -> Drafter:
    """Random trees of random tokens, some of them outside the vocabulary."""

    def draft(context: Tokens, sampler: DraftSampler) -> Proposal:
        generator = torch.Generator().manual_seed(seed + len(context))
        builder = ProposalBuilder()
        parents = [ROOT]
        for _ in range(4):
            width = int(torch.randint(1, 4, (1,), generator=generator))
            tokens = torch.randperm(vocab_size + 2, generator=generator)[:width].tolist()
            nodes = builder.add(parents.pop(0), tokens)
            parents += nodes
        return builder.build(num_scratch=1)

    return draft


class NoRepeats:
    """No two equal tokens in a row. The state is the last token."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def start(self) -> int | None:
        return None

    def advance(self, state: int | None, token: int) -> int:
        assert token != state, "advanced over a token it forbids"
        return token

    def allowed(self, state: int | None) -> Tensor | None:
        if state is None:
            return None
        mask = torch.ones(self.vocab_size, dtype=torch.bool)
        mask[state] = False
        return mask


class Brackets:
    """Balanced brackets up to a depth: 0 opens, 1 closes, 2 ends when balanced; then anything may follow."""

    ENDED = -1

    def __init__(self, vocab_size: int, max_depth: int = 3) -> None:
        self.vocab_size, self.max_depth = vocab_size, max_depth

    def start(self) -> int:
        return 0

    def advance(self, depth: int, token: int) -> int:
        mask = self.allowed(depth)
        assert mask is None or mask[token], "advanced over a token it forbids"
        if depth == self.ENDED or token == 2:
            return self.ENDED
        return depth + 1 if token == 0 else depth - 1

    def allowed(self, depth: int) -> Tensor | None:
        if depth == self.ENDED:
            return None
        mask = torch.zeros(self.vocab_size, dtype=torch.bool)
        mask[0], mask[1], mask[2] = depth < self.max_depth, depth > 0, depth == 0
        return mask
