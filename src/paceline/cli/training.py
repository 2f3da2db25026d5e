"""What `paceline train` does once its arguments are known to be good."""

import argparse
import json
import logging
import sys
from contextlib import nullcontext
from pathlib import Path

from paceline.cli.answering import plural
from paceline.cli.loading import load
from paceline.cli.recipes import Material, make
from paceline.errors import PacelineError
from paceline.models.home import megabytes, sole_writer
from paceline.models.origin import Origin
from paceline.models.shipped import EVALUATION
from paceline.ops.packed import unpacked
from paceline.train.dataset import Sample, Samples, hold_aside, packs_per_epoch, read_samples
from paceline.train.divergence import DIVERGENCES
from paceline.train.evaluate import Evaluation
from paceline.train.features import CachedFeatures, OnlineFeatures, cache_size
from paceline.train.loop import Features, Loop
from paceline.train.memory import keep_freed_memory
from paceline.train.processes import Processes, launched
from paceline.train.provenance import provenance
from paceline.train.recipe import Recipe
from paceline.train.settings import Settings


def train(args: argparse.Namespace) -> int:
    keep_freed_memory()
    if args.divergence not in DIVERGENCES:
        raise PacelineError(f"--divergence {args.divergence} is unknown", hint=f"one of: {', '.join(DIVERGENCES)}")
    processes = launched()
    samples = read_samples(Path(args.data), args.max_length)
    training, aside = hold_aside(samples.kept, args.hold_aside)
    if not training:
        raise PacelineError(
            f"{args.data} holds {plural(len(samples.kept), 'sample')}, and --hold-aside takes {args.hold_aside}",
            hint="generate more, or hold fewer aside",
        )
    settings = _settings(args, training)
    model = load(args, packed=False)
    unpacked(model.decoder.head)  # it is read and compared with as numbers
    logging.getLogger("paceline.train").setLevel(logging.INFO if processes.is_first else logging.WARNING)
    material = Material(model, Origin.of(model), training, aside)
    _tell(samples, material, processes)
    made = make(args, material)
    recipe, facts = made.recipe, made.facts
    if recipe.own_target is not None and processes.is_first:
        print(f"this makes another target: the answers will be its own, not {material.origin.name}'s", file=sys.stderr)
    about = provenance(model, material.origin, Path(args.data), samples, training, aside, processes) | facts
    prompts = [sample.token_ids[: sample.num_prompt] for sample in aside]
    evaluation = Evaluation(model, recipe, prompts, args.evaluate_tokens) if prompts else None
    out = Path(args.out)
    features = _features(args, recipe, material)
    loop = Loop(recipe, training, features, settings, out, about, evaluation, processes, made.rewrite)
    with sole_writer(out) if processes.is_first else nullcontext():
        loop.run()
    if processes.is_first:
        target = args.model if recipe.own_target is None else str(out / recipe.own_target)
        drafter: str | None = {"model": str(out), **recipe.drafting}["model"]
        run = {"method": recipe.method, "steps": loop.step, "tokens": loop.tokens}
        summary = {"target": target, "drafter": drafter, **run, **facts}
        found = out / EVALUATION
        if found.exists():
            summary["evaluation"] = json.loads(found.read_text(encoding="utf-8"))
        print(json.dumps(summary) if args.json else f"{out}: {_use(recipe.method, target, drafter)}")
    return 0


def _settings(args: argparse.Namespace, training: list[Sample]) -> Settings:
    steps = args.steps
    if steps is None:
        packs = packs_per_epoch(training, args.batch_tokens, args.seed)
        steps = max(1, round(args.epochs * packs / args.accumulate))
    return Settings(
        steps=steps,
        learning_rate=args.lr,
        warmup=args.warmup,
        clip=args.clip,
        weight_decay=args.weight_decay,
        optimizer=args.optimizer,
        batch_tokens=args.batch_tokens,
        accumulate=args.accumulate,
        seed=args.seed,
        bf16=args.bf16,
        evaluate_every=args.evaluate_every,
        save_every=args.save_every,
    )


def _features(args: argparse.Namespace, recipe: Recipe, material: Material) -> Features:
    target = material.model.decoder
    size = megabytes(cache_size(target, recipe.layers, material.training))
    if args.cache_features is None:
        print(f"features: computed in each epoch anew (--cache-features would take {size})", file=sys.stderr)
        return OnlineFeatures(target, recipe.layers)
    cached = CachedFeatures(target, material.origin, recipe.layers, material.training, Path(args.cache_features))
    print(f"features: {size} in {cached.folder}, {megabytes(cached.size_to_write)} still to write", file=sys.stderr)
    return cached


def _tell(samples: Samples, material: Material, processes: Processes) -> None:
    if not processes.is_first:
        return
    skipped = ", ".join(f"{count} {reason}" for reason, count in samples.skipped.items()) or "none"
    print(
        f"{plural(len(material.training), 'sample')}, {len(material.aside)} held aside, skipped: {skipped}",
        file=sys.stderr,
    )
    written_by = samples.about.get("target", {})
    if written_by.get("weights") != material.origin.weights:
        print(
            f"warning: the answers are {written_by.get('name', 'somebody')}'s, not {material.origin.name}'s: "
            "drafts fit best what the target itself says",
            file=sys.stderr,
        )


def _use(method: str, target: str, drafter: str | None) -> str:
    own = "" if drafter is None else f" --draft-model {drafter}"
    return f"paceline generate --model {target} --method {method}{own}"
