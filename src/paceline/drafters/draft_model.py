"""A smaller model with the same vocabulary drafts a chain, token by token, on a cache of its own.

Idea: a model a few times smaller agrees with the target on most tokens. It feeds what the target has kept since it
last drafted, in one pass, then drafts up to K tokens one by one, and ends a draft that is probably wrong already. All
requests are drafted for together.
Cost a step: a pass of the small model for every drafted token. Pays when its pass costs well under the target's and the
text is not copied.
Lossless under every lossless rule. Sources: Leviathan et al. 2211.17192; Chen et al. 2302.01318; where to end a draft:
Kim et al., BiLD, 2302.07863; EAGLE-2's product of confidences, 2406.16858.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.core.proposal import Proposal
from paceline.drafters.base import Drafter, Features, Needs, SequenceView
from paceline.drafters.chain import Chain
from paceline.drafters.config import SpeculativeConfig
from paceline.errors import PacelineError
from paceline.models.cache import KVPool, SequenceCache
from paceline.models.decoder import Decoder, Segment
from paceline.models.load import LoadedModel, load_model
from paceline.models.tokenizer import Tokenizer
from paceline.values import shown

DEFAULT_LEAST_CHANCE = 0.5
CATCH_UP_ROWS = 128  # rows of one sequence in a catch-up pass, at most


@dataclass(slots=True)
class _State:
    """The draft model's side of a request: its cache holds exactly the tokens `fed`."""

    cache: SequenceCache
    fed: list[int] = field(default_factory=list)
    observed: int = 0  # the first so many of `fed` were observed; the next is the last committed token, the rest drafts

    def keep_observed(self) -> None:
        del self.fed[self.observed :]  # first: an interruption leaves a cache that holds too much, never too little
        self.cache.truncate(self.observed)


class DraftModelDrafter:
    """Drafts chains with `decoder`. `max_positions`: rows of all requests together that its cache may hold.

    `least_chance`: a chain that is all right with a lower chance, as far as the draft knows, goes on no further.
    """

    name = "draft_model"
    needs = Needs()

    def __init__(self, decoder: Decoder, max_positions: int | None = None, least_chance: float = 0.0) -> None:
        self.decoder = decoder
        self.least_chance = least_chance
        self.pool: KVPool = decoder.new_pool(max_positions or decoder.config.max_context)
        self._states: dict[int, _State] = {}

    def observe(self, sequence: SequenceView, tokens: Sequence[int], features: Features) -> None:
        state = self._state(sequence)
        for token in tokens:
            if state.observed >= len(state.fed):
                break  # it lags: `propose` feeds the rest from the text itself
            if state.fed[state.observed] != token:
                state.keep_observed()
                break
            state.observed += 1

    def propose(self, sequences: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        chains = [
            Chain(sequence.draft_sampler, self._room(sequence, budget), self.least_chance)
            for sequence, budget in zip(sequences, budgets, strict=True)
        ]
        live = [i for i, chain in enumerate(chains) if chain.budget > 0]
        states = {i: self._state(sequences[i]) for i in live}
        logits = self._catch_up([(states[i], sequences[i].token_ids) for i in live])
        for i in live:  # before a token is drawn: to drop a draft for what it drew would be biased
            states[i].cache.reserve(chains[i].budget - 1)
        while live:
            for i, row in zip(live, logits, strict=True):
                chains[i].draw(row)
            live = [i for i in live if chains[i].open]
            logits = self._feed([(states[i], [chains[i].tokens[-1]]) for i in live])
        return [chain.proposal() for chain in chains]

    def _room(self, sequence: SequenceView, budget: int) -> int:
        """A draft ends where the draft model's own context does."""
        return min(budget, self.decoder.config.max_context - len(sequence.token_ids))

    def _catch_up(self, behind: list[tuple[_State, Sequence[int]]]) -> torch.Tensor:
        """Feed every state the text it lacks; logits [n, V] after each text's last token."""
        for state, tokens in behind:
            state.keep_observed()
            while len(tokens) - len(state.fed) > CATCH_UP_ROWS:
                start = len(state.fed)
                self._forward([(state, tokens[start : start + CATCH_UP_ROWS])])
        logits = self._feed([(state, tokens[len(state.fed) :]) for state, tokens in behind])
        for state, _ in behind:
            state.observed = len(state.fed) - 1  # the last token is the target's to process first
        return logits

    def _feed(self, batch: list[tuple[_State, Sequence[int]]]) -> torch.Tensor:
        """One pass over the given tokens of each state; logits [n, V] after the last of each."""
        if not batch:
            return torch.empty(0)
        hidden = self._forward(batch)
        ends = torch.tensor([len(tokens) for _, tokens in batch]).cumsum(0) - 1
        return self.decoder.logits(hidden[ends.to(hidden.device)])

    def _forward(self, batch: list[tuple[_State, Sequence[int]]]) -> torch.Tensor:
        out = self.decoder.forward([Segment(state.cache, self._known(tokens)) for state, tokens in batch])
        for state, tokens in batch:
            state.cache.commit(range(len(tokens)))
            state.fed.extend(tokens)
        return out.hidden

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """A target with more padding can emit ids that the draft model has no row for; any stand-in is lossless."""
        vocab_size = self.decoder.config.vocab_size
        return [token if token < vocab_size else 0 for token in tokens]

    def _state(self, sequence: SequenceView) -> _State:
        state = self._states.get(sequence.request_id)
        if state is None:
            state = self._states[sequence.request_id] = _State(self.pool.new_sequence())
        return state

    def snapshot(self, sequence: SequenceView) -> Any:
        state = self._states.get(sequence.request_id)
        return None if state is None else self._copy(state)

    def restore(self, sequence: SequenceView, snapshot: Any, length: int) -> None:
        self.release(sequence)
        if snapshot is not None:
            state = self._copy(snapshot)
            state.observed = min(state.observed, length)
            state.keep_observed()
            self._states[sequence.request_id] = state

    def discard(self, snapshot: Any) -> None:
        if snapshot is not None:
            snapshot.cache.release()

    def mend(self, snapshots: Sequence[Any]) -> None:
        """All else is made anew by the next draft; the blocks are those that somebody knows of."""
        self.pool.recount([state.cache.blocks for state in (*self._states.values(), *snapshots)])

    def fork(self, sequence: SequenceView, child: SequenceView) -> None:
        self.restore(child, self._states.get(sequence.request_id), len(sequence.token_ids))

    def release(self, sequence: SequenceView) -> None:
        state = self._states.pop(sequence.request_id, None)
        if state is not None:
            state.cache.release()

    @staticmethod
    def _copy(state: _State) -> _State:
        return _State(state.cache.fork(), list(state.fed), state.observed)


def create(config: SpeculativeConfig, target: LoadedModel) -> Drafter:
    if config.model is None:
        raise PacelineError(
            "method 'draft_model' needs a draft model", hint="name one, for instance --draft-model qwen2.5-coder-0.5b"
        )
    name = config.model
    draft = load_model(
        name,
        dtype=config.draft_dtype or target.precision,
        device=str(target.decoder.device),
        accept=lambda tokenizer: check_same_vocabulary(target, name, tokenizer),
    )
    decoder, size = draft.decoder, config.draft_vocab_size
    if size is not None and size > draft.config.vocab_size:
        raise PacelineError(
            f"draft_vocab_size is {size}, and the draft model {name} has {draft.config.vocab_size} tokens",
            hint="leave it out to draft from all of them",
        )
    if size is not None and size < draft.config.vocab_size:
        decoder = decoder.with_vocabulary(size)
    threshold = config.draft_confidence_threshold
    least_chance = DEFAULT_LEAST_CHANCE if threshold is None else threshold
    return DraftModelDrafter(decoder, config.draft_cache_tokens, least_chance)


def check_same_vocabulary(target: LoadedModel, name: str, tokenizer: Tokenizer | None) -> None:
    """Refuse a draft model with another tokenizer, naming the first token that differs; padding may differ."""
    if target.tokenizer is None or tokenizer is None:
        return
    difference = first_difference(target.tokenizer, tokenizer)
    if difference is not None:
        raise PacelineError(
            f"the draft model {name} has another tokenizer than the target {target.name}: {difference}",
            hint="draft with a model of the target's family, or use --method ngram",
        )


def first_difference(target: Tokenizer, draft: Tokenizer) -> str | None:
    ours, theirs = target.token_strings(), draft.token_strings()
    for token, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        if mine != other:
            return f"token {token} is {shown(mine)} in the target and {shown(other)} in the draft model"
    if len(ours) != len(theirs):
        longer, where = (ours, "target") if len(ours) > len(theirs) else (theirs, "draft model")
        token = min(len(ours), len(theirs))
        return f"token {token} ({shown(longer[token])}) is known to the {where} alone"
    return None
