"""What a draft head's matrices are held as. A drafter may be rounded as it likes: that never touches exactness."""

from dataclasses import dataclass

import torch

from paceline.models.decoder import Decoder
from paceline.models.packing import PACKED, check_packed_runs, pack_matrix
from paceline.models.precision import precision_of
from paceline.models.sources import PRECISIONS
from paceline.ops.dense import plain_linear
from paceline.ops.packed import AnyLinear, PackedLinear


@dataclass(frozen=True, slots=True)
class HeadMatrices:
    """Makes a head's linear layers.

    dtype: of states, norms and biases, and of matrices that are numbers. packed: the precision that matrices are packed
    in (`models.packing`); None leaves them numbers, through which gradients pass: so training has them.
    """

    dtype: torch.dtype
    device: torch.device
    packed: str | None = None

    @classmethod
    def of(cls, target: Decoder, draft_dtype: str | None = None) -> "HeadMatrices":
        """As `draft_dtype` says; None, "auto": int8 beside a target whose matrices are packed, else as the target's.

        Raises PacelineError for a precision that is unknown, or has no operators where the target runs.
        """
        precision = None if draft_dtype is None else precision_of(draft_dtype, "draft_dtype")
        if precision is None:
            is_packed = next(iter(target.packed_linears()), None) is not None
            return cls(target.dtype, target.device, "int8" if is_packed else None)
        check_packed_runs(precision, target.device)
        return cls(PRECISIONS[precision], target.device, precision if precision in PACKED else None)

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None, finely: bool = False) -> AnyLinear:
        """The layer of a matrix [out, in]; `finely`: in 8 bits at least."""
        own = None if bias is None else self.numbers(bias)
        if self.packed is None:
            return plain_linear(self.numbers(weight), own)
        return PackedLinear(pack_matrix(weight, self.packed, finely), own)

    def numbers(self, tensor: torch.Tensor) -> torch.Tensor:
        """What is no matrix, or a table that rows are looked up in."""
        return tensor.to(self.device, self.dtype)

    def target_output(self, target: Decoder, ids: torch.Tensor | None) -> AnyLinear:
        """The target's output layer, of a reduced vocabulary its rows `ids` [D] alone.

        The whole layer is shared, not copied, unless a copy would be held in fewer bits, or in another dtype.
        """
        head = target.head
        is_packed = isinstance(head, PackedLinear)
        if ids is None and target.dtype == self.dtype and (is_packed or self.packed is None):
            return head
        every = torch.arange(target.config.vocab_size, device=target.device) if ids is None else ids
        return self.linear(head.rows(every) if isinstance(head, PackedLinear) else head.weight[every], finely=True)
