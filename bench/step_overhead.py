"""What a step of the engine costs beside the model's own passes: packing, masks, sampling, bookkeeping.

    python bench/step_overhead.py [--model smollm2-135m] [--vocab 151936] [--steps 200] [--cpu-time]

Batch 1, a chain of five that is always right, greedy and sampled. Without --model: random weights, a small body under
a vocabulary of 152k, so that the logits are as wide as a real model's. Times are the median step's.
"""

import script  # noqa: F401 - Ctrl-C is one line from here on

# isort: split
import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from provenance import provenance, warn_if_busy

from paceline.core.params import SamplingParams
from paceline.core.proposal import Proposal
from paceline.drafters.base import SequenceView
from paceline.drafters.none import NoDrafter
from paceline.engine.engine import Engine, EngineConfig, RequestOptions
from paceline.models.config import ModelConfig, RopeConfig
from paceline.models.decoder import Decoder
from paceline.models.layout import canonical_parts, prepare
from paceline.models.load import load_model

K = 5


class Replay(NoDrafter):
    """Drafts the known answer."""

    name = "replay"
    text: Sequence[int] = ()

    def propose(self, sequences: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        return [
            Proposal.chain(self.text[len(sequence.token_ids) :][:budget])
            for sequence, budget in zip(sequences, budgets, strict=True)
        ]


class Clock:
    """Seconds of `now` spent in some methods of an object."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.seconds = 0.0

    def watch(self, owner: Any, name: str) -> None:
        inner: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = self.now()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds += self.now() - start

        setattr(owner, name, timed)


def random_config(vocab_size: int) -> ModelConfig:
    """A small body, whatever the vocabulary."""
    return ModelConfig(
        family="llama", vocab_size=vocab_size, hidden_size=128, intermediate_size=256, num_layers=2, num_heads=4,
        num_kv_heads=2, head_dim=32, rms_norm_eps=1e-5, max_context=8192, rope=RopeConfig(theta=10000.0),
        local_rope=None, tie_embeddings=True, qkv_bias=False, output_bias=False, mlp_bias=False, qk_norm=False,
        sandwich_norms=False, activation="silu", embedding_scale=1.0, attention_scale=32**-0.5,
        sliding_windows=(None, None), bos_token_id=None, eos_token_ids=(),
    )  # fmt: skip


def random_decoder(vocab_size: int) -> Decoder:
    config = random_config(vocab_size)
    generator = torch.Generator().manual_seed(0)
    shapes = canonical_parts(config)
    # the embedding's scale makes the logits' spread about 8: peaked, as a real model's are
    scale = {"model.embed_tokens.weight": 0.7, "model.norm.weight": 1.0}
    weights = (
        (name, scale.get(name, 0.35) * torch.randn(part.shape, generator=generator)) for name, part in shapes.items()
    )
    return Decoder(config, dict(prepare(config, weights, torch.bfloat16)), torch.bfloat16)


def measure(
    decoder: Decoder, params: SamplingParams, context: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    drafter = Replay()
    engine = Engine(decoder, EngineConfig(8192, 128), {"replay": drafter}, "replay", K)
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(0, decoder.config.vocab_size, (context,), generator=generator).tolist()

    def generate(options: RequestOptions) -> tuple[list[float], list[int]]:
        engine.add_request(prompt, params, options)
        beside: list[float] = []
        out: list[int] = []
        while engine.has_unfinished:
            passes.seconds = masks.seconds = 0.0
            start = clock()
            updates = engine.step()
            spent = clock() - start - passes.seconds + masks.seconds
            if updates and len(updates[0].token_ids) == (K + 1 if options.speculative else 1):
                beside.append(spent)
            out.extend(token for update in updates for token in update.token_ids)
        return beside, out

    passes, masks = Clock(clock), Clock(clock)
    forward, logits, masks_of = decoder.forward, decoder.logits, decoder._step
    try:
        passes.watch(decoder, "forward")
        passes.watch(decoder, "logits")
        masks.watch(decoder, "_step")
        plain, answer = generate(RequestOptions(speculative=False))
        drafter.text = [*prompt, *answer]
        chain, again = generate(RequestOptions())
    finally:
        decoder.forward, decoder.logits, decoder._step = forward, logits, masks_of  # type: ignore[method-assign]
    if again != answer:
        first = next(i for i, (a, b) in enumerate(zip(answer, again, strict=True)) if a != b)
        sys.exit(
            f"token {first} of {len(answer)} differs from plain decoding's {answer[first]}: {again[first]}; {params}"
        )
    return {"plain_ms": 1e3 * statistics.median(plain), "chain_ms": 1e3 * statistics.median(chain)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--cpu-time", action="store_true", help="count CPU time: steadier on a busy machine")
    args = parser.parse_args()
    warn_if_busy()
    decoder = load_model(args.model, dtype="bf16").decoder if args.model else random_decoder(args.vocab)
    tokens = args.steps * (K + 1)
    kinds = {
        "greedy": SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True),
        "T 1": SamplingParams(seed=1, max_tokens=tokens, ignore_eos=True),
        "T 0.8, top-p 0.95": SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=tokens, ignore_eos=True),
        "T 0.8, top-k 40": SamplingParams(temperature=0.8, top_k=40, seed=1, max_tokens=tokens, ignore_eos=True),
    }
    clock = time.process_time if args.cpu_time else time.perf_counter
    results = {name: measure(decoder, params, args.context, clock) for name, params in kinds.items()}
    greedy = results["greedy"]["chain_ms"]
    for name, result in results.items():
        more = (result["chain_ms"] - greedy) / (K + 1)
        print(
            f"{name:20} beside the passes: plain step {result['plain_ms']:.2f} ms, "
            f"chain of {K} {result['chain_ms']:.2f} ms"
            + ("" if name == "greedy" else f" ({more:+.2f} ms a token over greedy)")
        )
    print(
        json.dumps(
            {
                "provenance": provenance(),
                "clock": "cpu" if args.cpu_time else "wall",
                "vocab": decoder.config.vocab_size,
                "results": results,
            }
        )
    )


if __name__ == "__main__":
    main()
