"""What `paceline data generate` does once its arguments are known to be good."""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from paceline.cli.answering import plural
from paceline.cli.loading import load, require_tokenizer
from paceline.core.params import SamplingParams
from paceline.engine.llm import LLM
from paceline.errors import PacelineError
from paceline.models.home import sole_writer
from paceline.models.load import LoadedModel
from paceline.models.origin import Origin
from paceline.train.dataset import KIND, read_samples
from paceline.train.generate import Sampling, answer_prompts, write_prompts
from paceline.train.journal import Journal
from paceline.train.prompts import Exclusion, Prompt, digest, read_prompts, select


def generate(args: argparse.Namespace) -> int:
    sampling = Sampling(args.max_tokens, tuple(args.temperature), args.top_p, args.seed)
    for temperature in sampling.temperatures:
        SamplingParams(temperature=temperature, top_p=args.top_p, seed=args.seed)  # refuses what cannot be
    excluded = Exclusion.of(prompt for path in args.exclude for prompt in read_prompts(Path(path)))
    given = None if args.prompts is None else read_prompts(Path(args.prompts))
    model = load(args)
    if not require_tokenizer(model).has_chat_template:
        raise PacelineError(f"model {model.name} has no chat template", hint="take an instruction-tuned model")
    llm = LLM(model, max_num_seqs=args.batch)
    with sole_writer(Path(args.out)):
        _write(llm, args, sampling, excluded, given)
    return 0


def _write(
    llm: LLM, args: argparse.Namespace, sampling: Sampling, excluded: Exclusion, given: list[Prompt] | None
) -> None:
    """Prompts, unless some were given, and answers; then the summary."""
    out, model = Path(args.out), llm.model
    about = {**_about(model, sampling), "excluded": digest_of(excluded)}
    prompts = _own_prompts(llm, args, sampling, excluded, out, about) if given is None else _chosen(given, excluded)
    about["prompts"] = "self" if given is None else digest(given)
    prompts = prompts[: args.limit]
    journal = Journal(out, KIND, about)
    num_too_long = answer_prompts(llm, prompts, sampling, journal, Meter("answers", len(prompts)))
    samples = read_samples(out, model.config.max_context)
    print(
        json.dumps(
            {
                "file": str(out),
                "prompts": len(prompts),
                "prompts_too_long": num_too_long,
                "samples": len(samples.kept),
                "skipped": samples.skipped,
                "tokens": sum(len(sample.token_ids) for sample in samples.kept),
                "assistant_tokens": sum(sample.num_assistant for sample in samples.kept),
            }
        )
    )


def _about(model: LoadedModel, sampling: Sampling) -> dict[str, Any]:
    return {
        "target": Origin.of(model).to_dict(),
        "precision": model.precision,
        "max_tokens": sampling.max_tokens,
        "temperatures": sampling.temperatures,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
    }


def _chosen(given: list[Prompt], excluded: Exclusion) -> list[Prompt]:
    prompts, left = select(given, excluded)
    told = [f"{count} {reason}" for reason, count in left.items()]
    print(f"{plural(len(prompts), 'prompt')}{'; left out: ' + ', '.join(told) if told else ''}", file=sys.stderr)
    return prompts


def _own_prompts(
    llm: LLM, args: argparse.Namespace, sampling: Sampling, excluded: Exclusion, out: Path, about: dict[str, Any]
) -> list[Prompt]:
    journal = Journal(out.with_suffix(".prompts.jsonl"), "prompts", about)
    meter = Meter("prompts", args.self_prompt)
    return write_prompts(llm, args.self_prompt, sampling, excluded, journal, meter)


def digest_of(excluded: Exclusion) -> str:
    return digest([Prompt("", tuple(sorted(excluded.ids)) + tuple(sorted(excluded.keys)))])


class Meter:
    """Now and then a line on stderr: how much is done, how fast it goes."""

    def __init__(self, what: str, total: int, every: float = 5.0) -> None:
        self._what, self._total, self._every = what, total, every
        self._start = self._said = time.perf_counter()

    def __call__(self, done: int, tokens: int) -> None:
        now = time.perf_counter()
        if now - self._said < self._every:
            return
        self._said = now
        rate = tokens / (now - self._start)
        print(f"{self._what}: {done} of {self._total} · {tokens} tokens · {rate:.0f} tokens/s", file=sys.stderr)
