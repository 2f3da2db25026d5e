"""The block cache: sharing, copying on write, giving back."""

import pytest
import tiny
import torch

from paceline.models.cache import CacheFull, SequenceCache
from paceline.models.decoder import Decoder, Segment

DECODER = tiny.tiny_decoder("llama", dtype=torch.float32)


def feed(cache: SequenceCache, tokens: list[int], decoder: Decoder = DECODER) -> torch.Tensor:
    out = decoder.forward([Segment(cache, tokens)])
    cache.commit(range(len(tokens)))
    return decoder.logits(out.hidden)


def test_blocks_come_and_go_with_rows() -> None:
    pool = DECODER.new_pool(64 * 40)
    cache = pool.new_sequence()
    for count, blocks in ((1, 1), (63, 1), (1, 2), (64 * 30, 32)):
        feed(cache, tiny.prompt(count))
        assert pool.blocks_in_use == blocks
    cache.truncate(65)
    assert pool.blocks_in_use == 2
    cache.truncate(64)
    assert pool.blocks_in_use == 1
    cache.release()
    assert pool.blocks_in_use == 0


def test_a_fork_shares_blocks_until_one_side_writes() -> None:
    pool = DECODER.new_pool(64 * 8)
    cache = pool.new_sequence()
    feed(cache, tiny.prompt(100))
    fork = cache.fork()
    assert pool.blocks_in_use == 2
    mine = feed(fork, [1, 2, 3])
    assert pool.blocks_in_use == 3  # the full first block is still shared, the second one was copied
    theirs = feed(cache, [4, 5, 6])
    assert torch.equal(feed_cold(pool.new_sequence(), [1, 2, 3]), mine)
    assert torch.equal(feed_cold(pool.new_sequence(), [4, 5, 6]), theirs)
    cache.release()
    again = fork.fork()
    assert torch.equal(feed(again, [9]), feed(fork, [9]))
    again.release()
    fork.release()
    assert pool.blocks_in_use == 4  # the two cold ones


def feed_cold(cache: SequenceCache, tokens: list[int]) -> torch.Tensor:
    feed(cache, tiny.prompt(100))
    return feed(cache, tokens)


def test_a_full_pool_says_so_and_changes_nothing() -> None:
    pool = DECODER.new_pool(64)
    cache = pool.new_sequence()
    feed(cache, tiny.prompt(60))
    before = feed(cache.fork(), [7]) if pool.num_blocks > 1 else None
    with pytest.raises(CacheFull, match="1 KV blocks"):
        feed(cache, tiny.prompt(10))
    assert before is None and cache.length == 60
    feed(cache, tiny.prompt(4))
    assert cache.length == 64


def test_a_block_taken_again_is_clean() -> None:
    """A NaN left by an ended request must not reach the next one through a masked product."""
    pool = DECODER.new_pool(64)
    cache = pool.new_sequence()
    feed(cache, [1])
    pool.keys.fill_(torch.nan)
    pool.values.fill_(torch.nan)
    cache.release()
    assert torch.isfinite(feed(pool.new_sequence(), [1, 2, 3])).all()


def test_commit_of_a_scattered_path_across_a_block_border() -> None:
    pool = DECODER.new_pool(64 * 4)
    cache = pool.new_sequence()
    feed(cache, tiny.prompt(62))
    DECODER.forward([Segment(cache, [1, 9, 2, 9, 3, 9, 4], [-1, -1, 0, 0, 2, 2, 4])])
    cache.commit([0, 2, 4, 6])
    line = pool.new_sequence()
    feed(line, tiny.prompt(62))
    feed(line, [1, 2, 3, 4])
    assert cache.length == line.length == 66
    assert torch.equal(feed(cache, [5, 6]), feed(line, [5, 6]))


def test_truncate_refuses_nonsense() -> None:
    cache = DECODER.new_pool(64).new_sequence()
    with pytest.raises(ValueError, match="cannot truncate"):
        cache.truncate(1)
