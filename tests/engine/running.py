"""Helpers for engine tests: run requests, and what plain decoding of each alone gives."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

from paceline.core.params import SamplingParams
from paceline.core.rng import draw_seed
from paceline.decode import decode
from paceline.drafters.base import Drafter
from paceline.drafters.none import NoDrafter
from paceline.engine.engine import Engine, EngineConfig, RequestOptions
from paceline.engine.outputs import RequestOutput, Update
from paceline.models.decoder import Decoder
from paceline.models.tokenizer import Tokenizer

_known: WeakKeyDictionary[Decoder, dict[str, list[int]]] = WeakKeyDictionary()


def plain(
    target: Decoder,
    prompt: Sequence[int],
    params: SamplingParams,
    max_context: int | None = None,
    eos: Sequence[int] | None = None,
) -> list[int]:
    """The oracle: this request's first choice alone, without speculation; stop strings are not looked for."""
    params = replace(params, n=1, stop=(), logprobs=None)
    known, key = _known.setdefault(target, {}), repr((list(prompt), params, max_context, eos))
    if key not in known:
        steps = decode(target, prompt, params, NoDrafter(), 0, max_context=max_context, eos_token_ids=eos)
        known[key] = [token for step in steps for token in step.token_ids]
    return list(known[key])


def make_engine(
    target: Decoder,
    drafters: Mapping[str, Drafter] | None = None,
    *,
    max_num_seqs: int = 8,
    num_kv_blocks: int = 200,
    max_model_len: int = 512,
    prefix_cache_blocks: int = 0,
    max_num_batched_tokens: int = 512,
    num_draft_tokens: int = 4,
    tokenizer: Tokenizer | None = None,
    eos: Sequence[int] | None = None,
) -> Engine:
    config = EngineConfig(max_model_len, num_kv_blocks, max_num_seqs, max_num_batched_tokens, prefix_cache_blocks)
    method = next(iter(drafters)) if drafters else "none"
    return Engine(target, config, drafters, method, num_draft_tokens, tokenizer, eos)


@dataclass
class Run:
    """What came out: final outputs, and what the updates showed on the way."""

    outputs: dict[int, RequestOutput] = field(default_factory=dict)
    shown: dict[tuple[int, int], list[Update]] = field(default_factory=dict)
    num_steps: int = 0

    def ids(self, request_id: int, choice: int = 0) -> list[int]:
        return list(self.outputs[request_id].outputs[choice].token_ids)

    def take(self, updates: Sequence[Update]) -> None:
        self.num_steps += 1
        for update in updates:
            self.shown.setdefault((update.request_id, update.index), []).append(update)
            if update.output is not None:
                assert update.request_id not in self.outputs
                self.outputs[update.request_id] = update.output

    def check_streams(self) -> None:
        """What was shown, joined, is the output; only the last update of a choice says how it ended."""
        for (request_id, index), updates in self.shown.items():
            final = self.outputs[request_id].outputs[index]
            assert tuple(token for update in updates for token in update.token_ids) == final.token_ids
            assert "".join(update.text for update in updates) == final.text
            assert [update.finish_reason for update in updates] == [None] * (len(updates) - 1) + [final.finish_reason]
            if final.logprobs is not None:
                assert tuple(p for update in updates for p in update.logprobs or ()) == final.logprobs


def run(engine: Engine, between: Callable[[int], None] = lambda step: None, limit: int = 5000) -> Run:
    """Step until all is done; `between` is called before each step."""
    result = Run()
    for number in range(limit):
        between(number)
        if not engine.has_unfinished:
            break
        result.take(engine.step())
    else:
        raise AssertionError(f"not done after {limit} steps")
    result.check_streams()
    return result


def seeded(**changes: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.8, "top_p": 0.95, "seed": draw_seed(), "max_tokens": 30, **changes})  # type: ignore[arg-type]


__all__ = ["RequestOptions", "Run", "make_engine", "plain", "run", "seeded"]
