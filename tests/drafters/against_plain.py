"""For tests of drafters that run on the target's own layers, or learn from its logits."""

from collections.abc import Sequence
from typing import Any

import tiny
import torch
from engine.running import make_engine, plain, run

from paceline.core.params import SamplingParams
from paceline.core.proposal import Proposal
from paceline.decode import Step, decode
from paceline.drafters.base import Drafter, SequenceView
from paceline.engine.engine import RequestOptions
from paceline.models.cache import SequenceCache
from paceline.models.decoder import Decoder, Segment

PROMPT = tiny.prompt(50, seed=7)
PROMPTS = [tiny.prompt(length, seed=length) for length in (3, 61, 70)]
GREEDY = SamplingParams(temperature=0, max_tokens=24)
SEEDED = SamplingParams(temperature=0.8, top_p=0.95, seed=11, max_tokens=24)


def mild(family: str, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    """A target whose later layers change little: leaving some out is right often, and wrong often."""
    target = tiny.tiny_decoder(family, dtype=dtype)
    for layer in target.layers[1:]:
        layer.output.weight *= 0.2
        layer.down.weight *= 0.2
    return target


def tokens_of(steps: Sequence[Step]) -> list[int]:
    return [token for step in steps for token in step.token_ids]


def rows(cache: SequenceCache) -> tuple[torch.Tensor, torch.Tensor]:
    """All committed keys and values: [layers, n, kv_heads, head_dim] each."""
    blocks, offsets = cache.slots(0, cache.length)
    return cache.pool.keys[:, blocks, :, offsets], cache.pool.values[:, blocks, :, offsets]


class Watched:
    """A drafter, and before each draft a look at the target's cache: it is that of a fresh prefill, bit for bit."""

    def __init__(self, drafter: Drafter, target: Decoder) -> None:
        self.drafter, self.target = drafter, target
        self.num_rounds = self.num_looks = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def propose(self, sequences: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        self.num_rounds += 1
        for sequence in sequences if self.num_rounds % 5 == 0 else ():
            text = sequence.token_ids[:-1]
            fresh = self.target.new_pool(len(text)).new_sequence()
            self.target.forward([Segment(fresh, text)])
            fresh.commit(range(len(text)))
            for ours, expected in zip(rows(sequence.cache), rows(fresh), strict=True):
                assert torch.equal(ours, expected)
            self.num_looks += 1
        return self.drafter.propose(sequences, budgets)


def check_identity(target: Decoder, drafter: Drafter, k: int) -> None:
    """Loop and engine, alone and three together, greedy under `standard` and seeded: plain decoding's tokens."""
    watched = Watched(drafter, target)
    assert tokens_of(list(decode(target, PROMPT, SEEDED, watched, k))) == plain(target, PROMPT, SEEDED)
    for params, rule in ((GREEDY, "standard"), (SEEDED, "coupled")):
        expected = [plain(target, prompt, params) for prompt in PROMPTS]
        engine = make_engine(target, {"it": watched}, num_draft_tokens=k, max_num_batched_tokens=100)
        numbers = [engine.add_request(prompt, params, RequestOptions(rule=rule)) for prompt in PROMPTS]
        numbers.append(engine.add_request(PROMPTS[0], params, RequestOptions(speculative=False)))
        result = run(engine)
        assert [result.ids(number) for number in numbers] == [*expected, expected[0]]
        assert not engine.speculation.faults
        assert engine.pool.blocks_in_use == 0
        drafted = [result.outputs[number].metrics.speculation for number in numbers[:-1]]
        assert any(statistics.num_draft_tokens for statistics in drafted)
    assert watched.num_looks > 5
