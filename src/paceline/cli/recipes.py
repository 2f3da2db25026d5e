"""Recipes from the options of `paceline train`."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from paceline.drafters.early_exit import default_exit
from paceline.errors import PacelineError
from paceline.models.heads import DraftVocabulary
from paceline.models.load import LoadedModel
from paceline.models.origin import Origin
from paceline.train.dataset import Sample, batches
from paceline.train.features import OnlineFeatures, usual_sizes
from paceline.train.loop import Rewrite, as_it_is
from paceline.train.on_policy import OnPolicy
from paceline.train.recipe import Recipe
from paceline.train.recipes.draft_model import DraftModelRecipe, DraftModelSettings
from paceline.train.recipes.eagle import EagleRecipe, EagleSettings
from paceline.train.recipes.eagle3 import Eagle3Recipe, Eagle3Settings, default_aux_layers
from paceline.train.recipes.early_exit import EarlyExitRecipe, EarlyExitSettings
from paceline.train.recipes.layerskip import LayerSkipRecipe, LayerSkipSettings
from paceline.train.recipes.medusa import MedusaRecipe, MedusaSettings
from paceline.train.recipes.medusa_joint import JointMedusaRecipe, JointSettings
from paceline.train.student import spread_layers
from paceline.train.vocabulary import coverage, most_frequent


@dataclass(frozen=True, slots=True)
class Material:
    """What a recipe is made of."""

    model: LoadedModel
    origin: Origin
    training: list[Sample]
    aside: list[Sample]


@dataclass(frozen=True, slots=True)
class Made:
    """A recipe; `facts` for the provenance; `rewrite`: what texts it learns from."""

    recipe: Recipe
    facts: dict[str, Any]
    rewrite: Rewrite = as_it_is


def make(args: argparse.Namespace, material: Material) -> Made:
    """The recipe that was asked for. Raises PacelineError for what cannot be."""
    return MAKERS[args.what](args, material)


def _draft_vocabulary(args: argparse.Namespace, material: Material) -> tuple[DraftVocabulary, dict[str, Any]]:
    """The reduced vocabulary, and how much of the answers it can say."""
    config = material.model.config
    vocabulary = most_frequent(material.training, args.draft_vocab_size, config.vocab_size, config.eos_token_ids)
    covered = coverage(vocabulary, material.training, material.aside)
    print(
        f"draft vocabulary: {covered.size} of {config.vocab_size} tokens, {covered.training:.2%} of the answers "
        f"({covered.held_aside:.2%} of those held aside)",
        file=sys.stderr,
    )
    return vocabulary, {"draft_vocabulary": asdict(covered)}


def _eagle3(args: argparse.Namespace, material: Material) -> Made:
    vocabulary, facts = _draft_vocabulary(args, material)
    settings = Eagle3Settings(
        steps=args.ttt_steps,
        decay=args.decay,
        divergence=args.divergence,
        aux_layers=None if args.aux_layers is None else tuple(args.aux_layers),
        fuse_norms=args.fc_norm,
        norm_before_residual=args.norm_before_residual,
        norm_output=args.norm_output,
    )
    target = material.model.decoder
    scales = _scales(args, material, settings.aux_layers or default_aux_layers(target.config.num_layers))
    return Made(Eagle3Recipe(target, material.origin, vocabulary, settings, args.seed, scales), facts)


def _scales(args: argparse.Namespace, material: Material, layers: tuple[int, ...]) -> dict[int, torch.Tensor]:
    """How large the values of these layers' outputs usually are, and those that the output layer reads."""
    some = next(batches(material.training, args.batch_tokens, args.seed))
    return usual_sizes(OnlineFeatures(material.model.decoder, (*layers, -1))(some))


def _eagle(args: argparse.Namespace, material: Material) -> Made:
    settings = EagleSettings(args.ttt_steps, args.decay, args.token_weight, args.divergence)
    return Made(EagleRecipe(material.model.decoder, material.origin, settings, args.seed), {})


def _medusa(args: argparse.Namespace, material: Material) -> Made:
    options = {"heads_weight": args.heads_weight, "backbone_rate": args.backbone_rate}
    given = {name: value for name, value in options.items() if value is not None}
    if given and not args.joint:
        raise PacelineError(f"--{next(iter(given)).replace('_', '-')} is of --joint, which was not given")
    joint = JointSettings(**given)
    vocabulary, facts = _draft_vocabulary(args, material)
    settings = MedusaSettings(args.num_heads, args.num_blocks, args.decay, args.divergence)
    model, origin = material.model, material.origin
    if args.joint:
        return Made(JointMedusaRecipe(model, origin, vocabulary, settings, joint, args.seed), facts)
    return Made(MedusaRecipe(model.decoder, origin, vocabulary, settings, args.seed), facts)


def _early_exit(args: argparse.Namespace, material: Material) -> Made:
    vocabulary, facts = _draft_vocabulary(args, material)
    config = material.model.config
    layers = default_exit(config.num_layers) if args.layers is None else args.layers
    settings = EarlyExitSettings(layers, args.inner or 2 * config.hidden_size, args.divergence)
    scales = _scales(args, material, (layers - 1,))
    recipe = EarlyExitRecipe(material.model.decoder, material.origin, vocabulary, settings, args.seed, scales)
    return Made(recipe, facts)


def _draft_model(args: argparse.Namespace, material: Material) -> Made:
    if not 0 <= args.on_policy <= 1:
        raise PacelineError(f"--on-policy is {args.on_policy}; it must be from 0 to 1", hint="a share of the samples")
    model = material.model
    layers = args.keep_layers or spread_layers(model.config.num_layers, args.layers)
    settings = DraftModelSettings(tuple(layers), args.draft_vocab_size, args.divergence)
    recipe = DraftModelRecipe(model.decoder, material.origin, model.tokenizer, settings)
    facts = {"on_policy": args.on_policy, "layers": list(layers)}
    return Made(recipe, facts, OnPolicy(recipe.student, args.on_policy, args.seed) if args.on_policy else as_it_is)


def _layerskip(args: argparse.Namespace, material: Material) -> Made:
    count = material.model.config.num_layers
    layers = default_exit(count) if args.layers is None else args.layers
    every = min(8, count) if args.every is None else args.every
    settings = LayerSkipSettings(layers, args.dropout, every, args.exit_scale, args.divergence)
    return Made(LayerSkipRecipe(material.model, material.origin, settings, args.seed), {})


MAKERS: dict[str, Callable[[argparse.Namespace, Material], Made]] = {
    "eagle3": _eagle3,
    "eagle": _eagle,
    "medusa": _medusa,
    "early_exit": _early_exit,
    "draft_model": _draft_model,
    "layerskip": _layerskip,
}
