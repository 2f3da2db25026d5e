"""The search behind `paceline tune layer-skip`: hill climbing over sets of skipped sublayers, by measured speed.

Draft & Verify (2309.08168) searches the same sets by Bayesian optimisation; here one to three sublayers of the best set
so far are flipped at a time. Trial t depends on the log and on t alone, so an interrupted search goes on as it was.
"""

import argparse
import hashlib
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.cli.loading import require_tokenizer
from paceline.cli.tuning import Log, encode, read_prompts
from paceline.core.params import SamplingParams
from paceline.decode import decode
from paceline.drafters.base import Drafter
from paceline.drafters.layer_skip import LayerSkipDrafter, default_skips
from paceline.drafters.none import NoDrafter
from paceline.errors import PacelineError
from paceline.models.decoder import Decoder
from paceline.models.load import load_model


@dataclass(frozen=True, slots=True)
class Skips:
    """A set of sublayers left out."""

    attention: tuple[int, ...]
    mlp: tuple[int, ...]

    def flipped(self, num_layers: int, source: random.Random) -> "Skips":
        """With one to three sublayers more or fewer."""
        attention, mlp = set(self.attention), set(self.mlp)
        for sublayer in source.sample(range(2 * num_layers), source.randint(1, 3)):
            (attention if sublayer < num_layers else mlp).symmetric_difference_update({sublayer % num_layers})
        return Skips(tuple(sorted(attention)), tuple(sorted(mlp)))


@dataclass(frozen=True, slots=True)
class Trial:
    """What a set came to."""

    skips: Skips
    tokens_per_second: float
    acceptance_length: float

    @classmethod
    def parse(cls, values: dict[str, Any]) -> "Trial":
        skips = Skips(tuple(values["skips"]["attention"]), tuple(values["skips"]["mlp"]))
        return cls(skips, values["tokens_per_second"], values["acceptance_length"])


Measure = Callable[[Skips], Trial]


def search(
    measure: Measure, num_layers: int, num_trials: int, trials: list[Trial], keep: Callable[[Trial], None]
) -> Trial:
    """Try sets until there are `num_trials`, those of `trials` included; the best. `keep` hears of each."""
    while len(trials) < num_trials:
        trial = measure(_next_skips(num_layers, trials))
        best = max((other.tokens_per_second for other in trials), default=0.0)
        if trial.tokens_per_second > best:  # luck, perhaps: it must win twice
            trial = min(trial, measure(trial.skips), key=lambda t: t.tokens_per_second)
        trials.append(trial)
        keep(trial)
    return max(trials, key=lambda t: t.tokens_per_second)


def _next_skips(num_layers: int, trials: Sequence[Trial]) -> Skips:
    if not trials:
        return Skips(default_skips(num_layers), default_skips(num_layers))
    best = max(trials, key=lambda t: t.tokens_per_second).skips
    tried = {trial.skips for trial in trials}
    source = random.Random(len(trials))
    skips = best
    for _ in range(1000):  # a tiny model has few sets
        skips = best.flipped(num_layers, source)
        if skips not in tried:
            break
    return skips


@dataclass(frozen=True, slots=True)
class Workload:
    """What is decoded, greedily, to measure a drafter by; the first step of each answer is not timed."""

    target: Decoder
    prompts: Sequence[Sequence[int]]
    max_tokens: int
    num_draft_tokens: int
    now: Callable[[], float] = time.perf_counter

    def run(self, drafter: Drafter) -> tuple[float, float]:
        """Tokens per second, and acceptance length."""
        tokens = steps = 0
        seconds = 0.0
        params = SamplingParams(temperature=0, max_tokens=self.max_tokens)
        for prompt in self.prompts:
            answer = decode(self.target, prompt, params, drafter, self.num_draft_tokens)
            next(answer)
            start = self.now()
            for step in answer:
                steps += 1
                tokens += len(step.token_ids)
            seconds += self.now() - start
        if not steps:
            raise PacelineError("every answer ends with its first token: nothing can be measured", hint="other prompts")
        return tokens / seconds, tokens / steps

    def measure(self, skips: Skips) -> Trial:
        return Trial(skips, *self.run(LayerSkipDrafter(self.target, skips.attention, skips.mlp)))


def tune(args: argparse.Namespace) -> int:
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    prompts = read_prompts(Path(args.prompts), args.num_prompts)
    model = load_model(args.model, dtype=args.dtype)
    tokenizer = require_tokenizer(model)
    log = Log(
        Path(args.log),
        {
            "model": model.name,
            "precision": model.precision,
            "prompts": hashlib.sha256(json.dumps([prompts, args.raw]).encode()).hexdigest()[:16],
            "max_tokens": args.max_tokens,
            "num_draft_tokens": args.num_draft_tokens,
            "clock": "cpu" if args.cpu_time else "wall",
        },
        Trial.parse,
    )
    ids = [encode(tokenizer, prompt, args.raw) for prompt in prompts]
    clock = time.process_time if args.cpu_time else time.perf_counter
    workload = Workload(model.decoder, ids, args.max_tokens, args.num_draft_tokens, clock)
    workload.run(NoDrafter())  # warms up
    plain, _ = workload.run(NoDrafter())
    print(f"plain decoding: {plain:.1f} tokens/s", file=sys.stderr)
    for number, trial in enumerate(log.trials, 1):
        print(describe(number, trial, plain), file=sys.stderr)

    def keep(trial: Trial) -> None:
        log.keep(trial)
        print(describe(len(log.trials), trial, plain), file=sys.stderr, flush=True)

    best = search(workload.measure, model.config.num_layers, args.trials, list(log.trials), keep)
    if best.tokens_per_second <= plain:
        print("no set is faster than plain decoding on these prompts", file=sys.stderr)
    config = {
        "method": "layer_skip",
        "skip_attention_layers": best.skips.attention,
        "skip_mlp_layers": best.skips.mlp,
        "num_speculative_tokens": args.num_draft_tokens,
    }
    print(json.dumps(config))
    return 0


def describe(number: int, trial: Trial, plain: float) -> str:
    speed = f"{trial.tokens_per_second:.1f} tokens/s ({trial.tokens_per_second / plain:.2f} x plain)"
    skips = f"attention {_names(trial.skips.attention)} · mlp {_names(trial.skips.mlp)}"
    return f"trial {number}: {speed} · acceptance length {trial.acceptance_length:.2f} · skips {skips}"


def _names(layers: Sequence[int]) -> str:
    return ",".join(map(str, layers)) or "none"
