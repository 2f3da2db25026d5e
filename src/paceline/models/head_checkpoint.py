"""What a draft head's folder holds, checked against the target it is to draft for; Medusa's formats.

A head that does not fit would only never be right: so whatever does not fit is refused, naming both sides.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import torch

from paceline.errors import PacelineError
from paceline.models.decoder import Decoder
from paceline.models.head_files import HeadFiles, last_dimension, open_head
from paceline.models.head_matrices import HeadMatrices
from paceline.models.heads import DraftVocabulary, MedusaHead, MedusaHeads
from paceline.models.origin import own_settings
from paceline.values import shown

KINDS = {
    "medusa": "Medusa heads",
    "eagle": "an EAGLE-1/2 head",
    "eagle3": "an EAGLE-3 head",
    "early_exit": "an early exit's adapter",
}
VOCABULARY_ROWS = ("embed_tokens.weight", "t2d")  # of an EAGLE head: a row for each of the target's tokens
T = TypeVar("T")
_BLOCK = re.compile(r"(?:(\d+)\.(\d+)\.linear|blocks\.(\d+)\.layers\.(\d+))\.(weight|bias)")
OUTPUT = re.compile(r"(?:(\d+)\.\d+|lm_heads\.(\d+))\.weight")


def load_medusa(name: str, target: Decoder, draft_dtype: str | None = None) -> MedusaHeads:
    """Medusa heads for `target`: the original `medusa_lm_head.pt` or its safetensors, or vLLM's.

    How many heads there are, and whether they have output layers of their own, the tensors tell: published configs are
    wrong about it. `draft_dtype`: see `HeadMatrices.of`. Raises PacelineError.
    """
    matrices = HeadMatrices.of(target, draft_dtype)
    files = opened(name, "medusa")
    settings = own_settings(files.config, files.where) or {}
    hidden, vocab_size = target.config.hidden_size, target.config.vocab_size
    blocks: dict[int, dict[int, dict[str, torch.Tensor]]] = {}
    outputs: dict[int, torch.Tensor] = {}
    for key in list(files.tensors):
        if match := _BLOCK.fullmatch(key):
            head, layer = int(match[1] or match[3] or 0), int(match[2] or match[4] or 0)
            blocks.setdefault(head, {}).setdefault(layer, {})[match[5]] = _block(files, key, hidden)
        elif match := OUTPUT.fullmatch(key):
            head = int(match[1] or match[2] or 0)
            if head in outputs:
                raise PacelineError(f"{files.where}: {key} is a second output layer of head {head}")
            outputs[head] = files.take(key, files.rows(key), hidden)
    shared = files.find("lm_head.weight", files.rows("lm_head.weight"), hidden)
    if files.config.get("original_lm_head") or not outputs:  # vLLM's: one output layer for all heads
        shared = outputs.get(0) if shared is None else shared
        outputs = {} if shared is None else dict.fromkeys(blocks, shared)
    token_map = files.find("token_map", files.rows("token_map"))
    files.check_empty(KINDS["medusa"])
    check_vocabulary(files, "vocab_size", files.config.get("vocab_size"), vocab_size)
    shares = settings.get("output_layer") == "target"
    vocabulary = _medusa_vocabulary(files, outputs, token_map, vocab_size, target.device, shares)
    # without output layers of their own all heads read the target's, of a reduced vocabulary its rows
    shared_output = None if outputs else matrices.target_output(target, vocabulary.ids)
    heads = []
    count = max((*blocks, *outputs)) + 1
    for head in range(count):
        if head not in blocks or (outputs and head not in outputs):
            raise PacelineError(f"{files.where}: head {head} of {count} lacks its blocks or its output layer")
        own = blocks[head]
        missing = next((layer for layer in range(max(own) + 1) if "weight" not in own.get(layer, {})), None)
        if missing is not None:
            raise PacelineError(f"{files.where}: head {head} lacks the weight of its block {missing}")
        layers = tuple(matrices.linear(own[layer]["weight"], own[layer].get("bias")) for layer in range(len(own)))
        output = shared_output or matrices.linear(_selected(outputs[head], token_map), finely=True)
        heads.append(MedusaHead(layers, output))
    return MedusaHeads(tuple(heads), vocabulary, matrices.dtype)


def _medusa_vocabulary(
    files: HeadFiles,
    outputs: Mapping[int, torch.Tensor],
    token_map: torch.Tensor | None,
    vocab_size: int,
    device: torch.device,
    shares: bool,
) -> DraftVocabulary:
    """`shares`: the heads say that their output rows are the target's own."""
    if token_map is not None:
        ids = checked_ids(files, "token_map", token_map, vocab_size).long()
        for rows in map(len, outputs.values()) if outputs or shares else (0,):
            whole = is_same_vocabulary(rows, vocab_size) and int(ids.max()) < rows
            if rows != len(ids) and not whole:
                raise PacelineError(
                    f"{files.where}: token_map names {len(ids)} of the target's {vocab_size} tokens, "
                    f"a head's output layer has {rows} rows"
                )
        return DraftVocabulary(vocab_size, ids.to(device))
    check_medusa_rows(files, list(map(len, outputs.values())), vocab_size)
    return DraftVocabulary(vocab_size)


def _block(files: HeadFiles, key: str, hidden: int) -> torch.Tensor:
    """A block's weight or bias."""
    check_hidden(files, key, last_dimension(files.tensors[key].shape), hidden)
    return files.take(key, *((hidden, hidden) if key.endswith(".weight") else (hidden,)))


def check_medusa_blocks(files: HeadFiles, hidden: int) -> None:
    """Raise PacelineError for a block that has another shape than a target of this hidden size asks for."""
    for key in [key for key in files.tensors if _BLOCK.fullmatch(key)]:
        _block(files, key, hidden)


def check_medusa_rows(files: HeadFiles, rows: Sequence[int], vocab_size: int) -> None:
    """Refuse output layers, of so many rows, that no token_map explains: too many of them, or too few."""
    check_vocabulary(files, "the heads' output layer", max(rows, default=None), vocab_size)
    if rows and min(rows) < vocab_size:
        raise unnamed_rows(files, "the heads' output layer", min(rows), vocab_size, "token_map")


def _selected(output: torch.Tensor, token_map: torch.Tensor | None) -> torch.Tensor:
    """vLLM stores output layers whole beside a `token_map` that chooses rows, or reduced already."""
    return output if token_map is None or len(output) == len(token_map) else output[token_map.long()]


def kind_of(names: Iterable[str]) -> str | None:
    """Which kind of head has tensors of these names; None if none that we know has."""
    names = set(names)
    if any(_BLOCK.fullmatch(name) for name in names):
        return "medusa"
    if "layer.hidden_norm.weight" in names:
        return "eagle3"
    if "exit.down.weight" in names:
        return "early_exit"
    return "eagle" if "fc.weight" in names and "layer.self_attn.q_proj.weight" in names else None


def one_layer(tensors: Mapping[str, T]) -> dict[str, T]:
    """Whatever a head calls its one layer, its tensors begin with `layer.`."""
    return {re.sub(r"^(midlayer|layers\.0)\.", "layer.", key): tensor for key, tensor in tensors.items()}


def opened(name: str, kind: str) -> HeadFiles:
    """The head's files, if they hold the right kind of head; its layer's tensors begin with `layer.`."""
    files = open_head(name)
    renamed = files.tensors = one_layer(files.tensors)
    found = kind_of(renamed)
    if found is None:
        raise PacelineError(
            f"{files.where} holds no draft head that is known: its first tensor is {min(renamed, default='none')!r}",
            hint=f"known: {', '.join(KINDS.values())}",
        )
    if found != kind:
        raise PacelineError(
            f"method {shown(kind)} needs {KINDS[kind]}, and {files.where} holds {KINDS[found]}",
            hint=f'"method": "{found}"',
        )
    deeper = next((key for key in renamed if key.startswith("layers.")), None)
    if deeper is not None:
        raise PacelineError(f"{files.where}: {deeper} belongs to a second layer; heads of one layer are supported")
    return files


def checked_ids(files: HeadFiles, name: str, ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    if ids.is_floating_point():
        raise PacelineError(f"{files.where}: {name} holds {ids.dtype}, no token ids", hint="fetch the file again")
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        strange = int(ids[(ids < 0) | (ids >= vocab_size)][0])
        raise PacelineError(
            f"{files.where}: {name} leads to token {strange}, the target's vocabulary has {vocab_size} tokens",
            hint="the head was trained for another target",
        )
    if len(set(ids.tolist())) != len(ids):
        raise PacelineError(f"{files.where}: {name} leads two draft tokens to the same target token")
    return ids


def unnamed_rows(files: HeadFiles, what: str, rows: int, vocab_size: int, missing: str) -> PacelineError:
    return PacelineError(
        f"{files.where}: {what} has {rows} rows, the target {vocab_size} tokens, and there is no {missing}",
        hint=f"a reduced draft vocabulary comes with {missing}; or the head was trained for another target",
    )


def check_hidden(files: HeadFiles, what: str, theirs: int, target: int) -> None:
    if theirs != target:
        raise PacelineError(
            f"{files.where}: {what} is {theirs}, the target's hidden size is {target}",
            hint="the head was trained for another target",
        )


def check_vocabulary(files: HeadFiles, what: str, theirs: object, target: int) -> None:
    """Refuse a head for another vocabulary than the target's; None: it does not say."""
    if theirs is not None and not (type(theirs) is int and is_same_vocabulary(theirs, target)):
        raise PacelineError(
            f"{files.where}: {what} is of {theirs} tokens, the target's vocabulary has {target}",
            hint="the head was trained for another target",
        )


def is_same_vocabulary(one: int, other: int) -> bool:
    """Whether two sizes may be one vocabulary's: paddings differ, and a few tokens are added."""
    return abs(one - other) <= min(512, max(one, other) // 4)
