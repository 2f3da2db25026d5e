"""Who holds which KV block, counted anew: an interruption may have come between taking one and noting it."""

from collections import Counter
from collections.abc import Iterable

from paceline.models.cache import KVPool


def recount(pool: KVPool, holdings: Iterable[Iterable[int]]) -> None:
    """Set the pool's counts to what is held in fact; each holding is the blocks of one sequence or cache entry."""
    holders = Counter(block for blocks in holdings for block in blocks)
    references = [holders[block] for block in range(len(pool._references))]
    pool._references, pool._free = references, [block for block, held in enumerate(references) if not held][::-1]
