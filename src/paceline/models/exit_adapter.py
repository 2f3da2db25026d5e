"""What a trained early exit puts between the target's first layers and its output layer."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from paceline.errors import PacelineError
from paceline.models.decoder import Decoder
from paceline.models.head_checkpoint import KINDS, checked_ids, opened
from paceline.models.head_matrices import HeadMatrices
from paceline.models.heads import DraftVocabulary
from paceline.models.origin import own_settings
from paceline.ops.activation import silu
from paceline.ops.norm import rms_norm
from paceline.ops.packed import AnyLinear


@dataclass(frozen=True, slots=True)
class ExitAdapter:
    """h + U·SiLU(D·norm(h)) after `num_layers` layers, a norm of its own, and the output layer's rows.

    Differentiable: training computes with it too. Source: the exit of Kangaroo (2404.18911), without its attention.
    """

    num_layers: int
    input_norm: torch.Tensor
    down: AnyLinear
    up: AnyLinear
    output_norm: torch.Tensor
    output: AnyLinear
    vocabulary: DraftVocabulary
    eps: float

    def read(self, hidden: torch.Tensor) -> torch.Tensor:
        """States as the output layer reads them: [n, d] → [n, d]."""
        hidden = hidden.to(self.input_norm.dtype)
        hidden = hidden + self.up(silu(self.down(rms_norm(hidden, self.input_norm, self.eps))))
        return rms_norm(hidden, self.output_norm, self.eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, d] → [n, V]."""
        return self.vocabulary.spread(self.output(self.read(hidden)))


def make_adapter(
    tensors: Mapping[str, torch.Tensor],
    matrices: HeadMatrices,
    num_layers: int,
    output: AnyLinear,
    vocabulary: DraftVocabulary,
    eps: float,
) -> ExitAdapter:
    """Of tensors by their names in a checkpoint."""
    return ExitAdapter(
        num_layers,
        matrices.numbers(tensors["exit.input_norm.weight"]),
        matrices.linear(tensors["exit.down.weight"]),
        matrices.linear(tensors["exit.up.weight"]),
        matrices.numbers(tensors["exit.norm.weight"]),
        output,
        vocabulary,
        eps,
    )


def load_exit_adapter(name: str, target: Decoder, draft_dtype: str | None = None) -> ExitAdapter:
    """Our own format; nobody else publishes one. `draft_dtype`: see `HeadMatrices.of`. Raises PacelineError."""
    matrices = HeadMatrices.of(target, draft_dtype)
    files = opened(name, "early_exit")
    own = own_settings(files.config, files.where)
    if own is None or not isinstance(own.get("early_exit_layer"), int):
        raise PacelineError(f"{files.where}: config.json does not say after which layer the exit is")
    size, vocab_size = target.config.hidden_size, target.config.vocab_size
    inner = files.rows("exit.down.weight")
    shapes = {
        "exit.input_norm.weight": (size,),
        "exit.down.weight": (inner, size),
        "exit.up.weight": (size, inner),
        "exit.norm.weight": (size,),
    }
    tensors = {key: files.take(key, *shape) for key, shape in shapes.items()}
    token_map = files.find("token_map", files.rows("token_map"))
    files.check_empty(KINDS["early_exit"])
    vocabulary = DraftVocabulary(vocab_size)
    if token_map is not None:
        ids = checked_ids(files, "token_map", token_map, vocab_size).long().to(target.device)
        vocabulary = DraftVocabulary(vocab_size, ids)
    output = matrices.target_output(target, vocabulary.ids)
    return make_adapter(tensors, matrices, own["early_exit_layer"], output, vocabulary, target.config.rms_norm_eps)
