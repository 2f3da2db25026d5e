"""Who runs in the next step: first come, first served, as far as KV blocks and rows go."""

from collections.abc import Mapping
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field

from paceline.drafters.base import draft_budget
from paceline.engine.prefix_cache import PrefixCache
from paceline.engine.results import LiveRequest
from paceline.engine.sequence import Sequence
from paceline.engine.timing import StepShape
from paceline.models.cache import KVPool
from paceline.ops.attention import BLOCK

# A prompt's chunks end at multiples of this position, however the step is packed: drafters observe the same chunks.
CHUNK = 128


@dataclass(frozen=True, slots=True)
class Turn:
    """A sequence that decodes, and how many nodes its drafter may propose."""

    sequence: Sequence
    budget: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next rows of a prompt (or of a put-back sequence's text)."""

    sequence: Sequence
    token_ids: Ids[int]


@dataclass(slots=True)
class Schedule:
    """One step's work. `put_back` lost their blocks before the step."""

    put_back: list[Sequence] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def shape(self) -> StepShape:
        turns, chunks = self.turns, self.chunks
        context = sum(turn.sequence.cache.length for turn in turns) / len(turns) if turns else 0.0
        return StepShape(len(turns), len(chunks), sum(len(chunk.token_ids) for chunk in chunks), context)


class Scheduler:
    """Tells which of the `live` sequences run. Those are in order of arrival.

    What it decides is kept in the sequences themselves, a flag each, so that none is lost when it is interrupted.
    """

    def __init__(
        self,
        live: Mapping[int, LiveRequest],
        pool: KVPool,
        prefix_cache: PrefixCache,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        self._live = live
        self._pool = pool
        self._prefix_cache = prefix_cache
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens

    @property
    def running(self) -> list[Sequence]:
        """Those that have a seat, in order of arrival."""
        return [sequence for sequence in self._sequences if sequence.runs]

    @property
    def waiting(self) -> list[Sequence]:
        """The others, in order of arrival."""
        return [sequence for sequence in self._sequences if not sequence.runs]

    @property
    def _sequences(self) -> list[Sequence]:
        return [sequence for request in self._live.values() for sequence in request.sequences]

    def schedule(self) -> Schedule:
        """Decide the next step; blocks for all its rows are taken."""
        plan = Schedule()
        self._trim()
        # 1. The running ones go on, oldest first. Who finds no block for its next row puts the youngest back.
        for sequence in self.running:
            if sequence.runs and sequence.decodes:
                self._make_room(sequence, plan)
        plan.turns = [self._turn(sequence) for sequence in self.running if sequence.decodes]
        # 2. The waiting come in, in order, while there is room for all that they have.
        for sequence in self.waiting:
            if plan.put_back or len(self.running) >= self._max_num_seqs or not self._admit(sequence, plan):
                break
            if sequence.decodes:
                plan.turns.append(self._turn(sequence))
        # 3. Prompts, a chunk each, as far as the step's rows go; one chunk always goes.
        rows = sum(1 + turn.budget for turn in plan.turns)
        for sequence in self.running:
            chunk = _next_chunk(sequence)
            if chunk and (not plan.chunks or rows + len(chunk) <= self._max_num_batched_tokens):
                plan.chunks.append(Chunk(sequence, chunk))
                rows += len(chunk)
        return plan

    def put_back(self, sequence: Sequence) -> None:
        """Its blocks go, its tokens stay: it will be computed again when there is room."""
        sequence.runs = False
        sequence.num_put_back += 1
        sequence.cache.release()

    def _trim(self) -> None:
        """Take back the blocks of the last step's rejected drafts, where somebody may lack them.

        Else they wait for the next draft: whoever takes a block has to clear it.
        """
        running = self.running
        decoding = [sequence for sequence in running if sequence.decodes]
        most = sum(2 + sequence.request.num_draft_tokens // BLOCK for sequence in decoding)
        seats = self._max_num_seqs - len(running)
        most += sum(2 + len(sequence.token_ids) // BLOCK for sequence in self.waiting[:seats])
        if self._pool.num_free < most:
            for sequence in decoding:
                sequence.cache.truncate(sequence.cache.length)

    def _turn(self, sequence: Sequence) -> Turn:
        """Drafts take free blocks, and those of the prefix cache, but nobody else's."""
        drafter, most, cache = sequence.drafter, sequence.request.num_draft_tokens, sequence.cache
        budget = 0 if drafter is None else draft_budget(drafter, most, sequence.num_left)
        if not self._free_up(cache.blocks_to_take(1 + budget)):
            budget = len(cache.blocks) * BLOCK - cache.length - 1
        cache.reserve(1 + budget)
        return Turn(sequence, budget)

    def _admit(self, sequence: Sequence, plan: Schedule) -> bool:
        """Take the blocks of all its tokens, and leave one for each that runs: else it would soon be put back."""
        if sequence.hit is not None:
            sequence.cache.release()  # an admission that was interrupted, or had no room: what was found may be gone
        fresh = not sequence.cache.blocks
        if fresh:
            sequence.hit = self._prefix_cache.lookup(sequence.token_ids[:-1], sequence.drafter)
            sequence.cache.share_prefix(sequence.hit.blocks)
        rows, running = 1 + sequence.num_to_prefill, len(self.running)
        while not self._free_up(sequence.cache.blocks_to_take(rows) + running):
            others = [other for other in self.waiting if other.cache.blocks and other is not sequence]
            if running or not others:
                if fresh:
                    sequence.cache.release()
                return False
            self._put_back(max(others, key=_arrival), plan)
        sequence.cache.reserve(rows)
        sequence.runs = True
        return True

    def _make_room(self, sequence: Sequence, plan: Schedule) -> None:
        """Take a block for its next row if it needs one; it may itself be the youngest, and be put back."""
        while not self._free_up(sequence.cache.blocks_to_take(1)):
            holders = [other for other in (*self.running, *self.waiting) if other.cache.blocks]
            youngest = max(holders, key=_arrival)
            self._put_back(youngest, plan)
            if youngest is sequence:
                return
        sequence.cache.reserve(1)

    def _put_back(self, sequence: Sequence, plan: Schedule) -> None:
        self.put_back(sequence)
        plan.put_back.append(sequence)

    def _free_up(self, blocks: int) -> bool:
        """Blocks for somebody, at the prefix cache's cost if need be; it loses nothing where that is not enough."""
        short = blocks - self._pool.num_free
        if short > 0 and short > self._prefix_cache.num_evictable:
            return False
        for _ in range(short):
            self._prefix_cache.evict_one()
        return True


def _arrival(sequence: Sequence) -> tuple[int, int]:
    return sequence.arrival


def _next_chunk(sequence: Sequence) -> Ids[int]:
    start = sequence.cache.length
    stop = min((start // CHUNK + 1) * CHUNK, len(sequence.token_ids) - 1)
    return sequence.token_ids[start:stop]
