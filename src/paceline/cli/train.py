"""`paceline train`: a drafter for a model, from what the model itself has written."""

import argparse
from typing import Any

from paceline.cli.options import add_model_options, check_model_options

RECIPES = {
    "eagle3": "a one-layer head on three of the target's hidden states",
    "eagle": "a one-layer head on the target's last hidden state (EAGLE-1, EAGLE-2)",
    "medusa": "heads that each guess one token further ahead",
    "early_exit": "an adapter by which the target's first layers draft",
    "draft_model": "a small model, made of some of the target's layers",
    "layerskip": "a copy of the target whose first layers draft for it (LayerSkip)",
}
NOTES = {  # where a drafter may come with another target
    "medusa": "With --joint the answers are those of a copy of the target that learns along: another target.",
    "layerskip": "It is another target: the answers are the copy's, no longer the original's.",
}
LEARNING_RATES = {
    "eagle3": 3e-4,
    "eagle": 3e-4,
    "medusa": 1e-3,
    "early_exit": 1e-3,
    "draft_model": 1e-4,
    "layerskip": 1e-4,
}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "train",
        help="train a drafter for a model",
        description="Train a drafter on samples that `paceline data generate` wrote. The target itself is never "
        "changed: `layerskip` and `medusa --joint` train a copy of it, which is another target, with answers of its "
        "own. Interrupted, training goes on from its last checkpoint, as if it had not been.",
    )
    kinds = parser.add_subparsers(title="what", dest="what", metavar="WHAT", required=True)
    for name, summary in RECIPES.items():
        kind = kinds.add_parser(name, help=summary, description=f"Train {summary}. {NOTES.get(name, '')}")
        add_run_options(kind, LEARNING_RATES[name])
        ADD_OPTIONS[name](kind)
        add_model_options(kind)
        kind.set_defaults(draft_model=None, rule="coupled")


# fmt: off
def add_run_options(parser: argparse.ArgumentParser, learning_rate: float) -> None:
    add = parser.add_argument
    add("--data", required=True, metavar="FILE", help="samples of `paceline data generate`")
    add("--out", "-o", required=True, metavar="FOLDER", help="where the drafter and its checkpoints go")
    add("--json", action="store_true", help="print one JSON object at the end")
    add = parser.add_argument_group("run").add_argument
    add("--steps", type=int, metavar="N", help="optimizer steps (default: as many as --epochs takes)")
    add("--epochs", type=float, default=2.0, metavar="X", help="times that each sample is seen (default: %(default)s)")
    add("--lr", type=float, default=learning_rate, metavar="X", help="highest learning rate (default: %(default)s)")
    add("--optimizer", default="adamw", choices=("adamw", "muon"),
        help="muon: orthogonal steps of the matrices (default: %(default)s)")
    add("--warmup", type=float, default=0.04, metavar="X", help="share of the steps (default: %(default)s)")
    add("--clip", type=float, default=0.5, metavar="X", help="norm that gradients are cut to (default: %(default)s)")
    add("--weight-decay", type=float, default=0.0, metavar="X", help="of matrices (default: %(default)s)")
    add("--batch-tokens", type=int, default=2048, metavar="N", help="computed at once (default: %(default)s)")
    add("--accumulate", type=int, default=1, metavar="N", help="of such packs in a step (default: %(default)s)")
    add("--max-length", type=int, default=2048, metavar="N",
        help="longer samples are skipped, and counted (default: %(default)s)")
    add("--bf16", action="store_true", help="products in bfloat16, weights and sums in float32")
    add("--seed", type=int, default=0, metavar="N", help="of first weights and order (default: %(default)s)")
    add("--save-every", type=int, default=200, metavar="N", help="steps between checkpoints (default: %(default)s)")
    add("--cache-features", metavar="FOLDER",
        help="keep what the target computes on disk; the size is told first (default: computed anew in each epoch)")
    add = parser.add_argument_group("evaluation").add_argument
    add("--hold-aside", type=int, default=16, metavar="N", help="prompts never trained on (default: %(default)s)")
    add("--evaluate-every", type=int, default=0, metavar="N", help="steps; 0: at the end alone (default: %(default)s)")
    add("--evaluate-tokens", type=int, default=64, metavar="N", help="decoded a prompt (default: %(default)s)")


def add_eagle3_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("head").add_argument
    add("--ttt-steps", type=int, default=5, metavar="N", help="steps of training-time test (default: %(default)s)")
    add("--aux-layers", type=int, nargs="+", metavar="I",
        help="layers whose outputs are read, counted from 0 (default: 1, L/2 - 1, L - 4)")
    add("--fc-norm", action="store_true", help="norm each of the states that are read (EAGLE-3.1)")
    add("--norm-output", action="store_true", help="feed states back as the output layer reads them (EAGLE-3.1)")
    add("--norm-before-residual", action="store_true", help="the residual stream begins with the normed feature")
    add_output_options(add)


def add_eagle_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("head").add_argument
    add("--ttt-steps", type=int, default=3, metavar="N", help="steps on the head's own states (default: %(default)s)")
    add("--token-weight", type=float, default=0.1, metavar="X",
        help="of the divergence, beside the distance of the states (default: %(default)s)")
    add_divergence(add)
    add_decay(add)


def add_medusa_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("heads").add_argument
    add("--num-heads", type=int, default=4, metavar="N", help="tokens that are guessed ahead (default: %(default)s)")
    add("--num-blocks", type=int, default=1, metavar="N", help="blocks of each head (default: %(default)s)")
    add_output_options(add)
    add = parser.add_argument_group("joint", "heads and a copy of the target learn together (Medusa-2)").add_argument
    add("--joint", action="store_true",
        help="write the copy to OUT/target: a new target, whose answers are its own; the heads fit it and no other")
    add("--heads-weight", type=float, metavar="X",
        help="of the heads' losses, beside how far the copy is from the original (default: 0.2)")
    add("--backbone-rate", type=float, metavar="X",
        help="the copy's learning rate, as a share of the heads', at most 0.25 (default: 0.05)")


def add_early_exit_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("exit").add_argument
    add("--layers", type=int, metavar="E", help="layers that draft (default: a quarter)")
    add("--inner", type=int, metavar="N", help="width of the adapter (default: twice the hidden size)")
    add_draft_vocabulary(add)
    add_divergence(add)


def add_draft_model_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("student").add_argument
    add("--layers", type=int, default=4, metavar="N",
        help="of the target's, evenly spread, that the student begins as (default: %(default)s)")
    add("--keep-layers", type=int, nargs="+", metavar="I", help="these layers instead, counted from 0")
    add("--draft-vocab-size", type=int, default=0, metavar="N",
        help="it draws from the first N ids, as draft_vocab_size has it; 0: from all (default: %(default)s)")
    add("--on-policy", type=float, default=0.0, metavar="SHARE",
        help="of the samples whose answers the student writes itself, anew each time (default: %(default)s)")
    add_divergence(add)


def add_layerskip_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("copy").add_argument
    add("--layers", type=int, metavar="E",
        help="layers that draft in evaluations (default: a quarter, as `--method early_exit` has it)")
    add("--dropout", type=float, default=0.1, metavar="P",
        help="how often the last layer is left out of a document, earlier ones less (default: %(default)s)")
    add("--every", type=int, metavar="R",
        help="every R-th layer is read in a step, from one that is drawn; and the last (default: 8, or all there are)")
    add("--exit-scale", type=float, default=0.2, metavar="X",
        help="what earlier layers count, beside the last (default: %(default)s)")
    add_divergence(add)


def add_output_options(add: Any) -> None:
    add_draft_vocabulary(add)
    add_divergence(add)
    add_decay(add)


def add_draft_vocabulary(add: Any) -> None:
    add("--draft-vocab-size", type=int, default=8192, metavar="N",
        help="drafts are of the N tokens said most; 0: of all (default: %(default)s)")


def add_divergence(add: Any) -> None:
    add("--divergence", default="forward_kl", metavar="NAME",
        help="forward_kl, reverse_kl, jsd, tv or acceptance (default: %(default)s)")


def add_decay(add: Any) -> None:
    add("--decay", type=float, default=0.8, metavar="X",
        help="weight of what is one token further ahead (default: %(default)s)")
# fmt: on


ADD_OPTIONS = {
    "eagle3": add_eagle3_options,
    "eagle": add_eagle_options,
    "medusa": add_medusa_options,
    "early_exit": add_early_exit_options,
    "draft_model": add_draft_model_options,
    "layerskip": add_layerskip_options,
}


def run(args: argparse.Namespace) -> int:
    check_model_options(args)
    from paceline.cli.training import train

    return train(args)
