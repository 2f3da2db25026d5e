"""`PathSampler`: a request's distribution after one path; `TargetWeights`: after each node of a tree."""

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.core.constraint import State, TokenConstraint, Unconstrained
from paceline.core.history import History
from paceline.core.params import SamplingParams
from paceline.core.proposal import Proposal, Verdict
from paceline.core.rng import Noise
from paceline.core.rows import ScannedRow, ScannedRows
from paceline.core.sampling import BadLogitsError, NoTokenAllowedError, token_support
from paceline.core.support import AnySupport, Support
from paceline.core.tree import ROOT


@dataclass(frozen=True, slots=True)
class PathSampler:
    """Everything but the logits that the next token's distribution depends on, at one path of one request.

    A value: `advance` makes a new one, so tree nodes, forks for `n` > 1 and a request put back and recomputed
    never disturb each other. Engine, verification and drafters hold the same type.
    """

    params: SamplingParams
    vocab_size: int
    history: History
    noise: Noise  # of the next token
    end_tokens: frozenset[int]
    constraint: TokenConstraint
    state: State

    @classmethod
    def start(
        cls,
        params: SamplingParams,
        prompt: Iterable[int],
        vocab_size: int,
        noise: Noise,
        eos_token_ids: Iterable[int] = (),
        constraint: TokenConstraint | None = None,
    ) -> "PathSampler":
        """The sampler after the prompt. `eos_token_ids` are the model's own: min_tokens bans them too.

        Raises PacelineError if a parameter names a token outside the vocabulary.
        """
        params.check_vocabulary(vocab_size)
        constraint = constraint or Unconstrained()
        end_tokens = {*params.stop_token_ids, *(token for token in eos_token_ids if token < vocab_size)}
        history = History(tuple(prompt))
        return cls(params, vocab_size, history, noise, frozenset(end_tokens), constraint, constraint.start())

    @property
    def position(self) -> int:
        """Index of the generated token that comes next."""
        return self.history.position

    def advance(self, *tokens: int) -> "PathSampler":
        """The sampler after `tokens`."""
        state = self.state
        for token in tokens:
            state = self.constraint.advance(state, token)
        history, noise = self.history.after(*tokens), self.noise.ahead(len(tokens))
        return replace(self, history=history, noise=noise, state=state)

    def weights(self, logits: Tensor) -> Tensor:
        """Unnormalised probabilities [V] of the next token from its logits [V]; raises as `token_support`."""
        return self.support(logits).dense(len(logits))

    def support(self, logits: Tensor | ScannedRow) -> AnySupport:
        """The same, of the possible tokens alone; of a row that may have been looked at."""
        allowed = self.constraint.allowed(self.state)
        return token_support(logits, self.params, self.history, self.end_tokens, allowed)


def rows_after(rows: ScannedRows) -> Callable[[int], ScannedRow]:
    """The target's rows of a pass by node of the proposal: of [1 + N, V], row 0 is the root's (node −1)."""
    return lambda node: rows[node + 1]


class TargetWeights:
    """The target's distribution at each node of a proposal, computed when asked for: node −1 is the root.

    Verification asks only along the path it walks, so history and constraint advance over accepted tokens
    only, and a bad row on a path not taken harms nobody. Nor does one after a stop token: what follows is cut away.
    After an accepted draft it ends the step there (`decided`); the next step meets it as plain decoding does.
    """

    def __init__(
        self,
        sampler: PathSampler,
        proposal: Proposal,
        logits: Callable[[int], ScannedRow],
        stop_ids: Set[int] = frozenset(),
    ) -> None:
        """`sampler` stands at the last committed token; `logits(node)` is the target's row [V] after it."""
        self._proposal = proposal
        self._logits = logits
        self._stop_ids = stop_ids
        self._samplers = {ROOT: sampler}
        self._barred: set[int] = set()  # drafted nodes that no token can follow, as far as was asked

    def __call__(self, node: int) -> Tensor:
        return self.support(node).dense(self._samplers[ROOT].vocab_size)

    def support(self, node: int) -> AnySupport:
        """The same, of the possible tokens alone."""
        row = self._logits(node)
        if node == ROOT:
            return self.sampler(ROOT).support(row)
        if self._proposal.tokens[node] in self._stop_ids or self._proposal.parents[node] in self._barred:
            return _any_token(row.values)
        try:
            return self.sampler(node).support(row)
        except (BadLogitsError, NoTokenAllowedError):
            self._barred.add(node)
            return _any_token(row.values)

    def decided(self, verdict: Verdict) -> Verdict:
        """A rule's verdict up to the first drafted token with a bad row: what the rule went on with was made up.

        Every rule is exact for a target that is made up there, and what it accepts before depends on true rows alone.
        """
        for count, node in enumerate(verdict.path):
            if node in self._barred:
                return Verdict(verdict.path[:count], self._proposal.tokens[node])
        return verdict

    def sampler(self, node: int) -> PathSampler:
        """The sampler after a node's token."""
        if node not in self._samplers:
            parent = self.sampler(self._proposal.parents[node])
            self._samplers[node] = parent.advance(self._proposal.tokens[node])
        return self._samplers[node]


def _any_token(row: Tensor) -> Support:
    """Of a node that nothing will follow."""
    return Support(row.new_ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.int64, device=row.device))
