"""GGUF models, single or split: the weights under their canonical names, dequantised one at a time.

Dequantisation is gguf-py's reference.
"""

import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.errors import PacelineError
from paceline.models.gguf_header import REDOWNLOAD, TensorInfo, parse_header
from paceline.models.gguf_metadata import Metadata
from paceline.ops.packed import BF16, TYPES, pack
from paceline.values import shown

CHUNK_ELEMENTS = 1 << 18  # dequantised at a time, small enough for a core's cache
_SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class GgufFile:
    """An opened and checked GGUF model: metadata of the first part, tensors of all parts."""

    parts: tuple[Path, ...]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]  # by GGUF name

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))

    def weight_names(self) -> list[str]:
        """Canonical (Hugging Face) names of the weights, read from nothing but the header."""
        return [canonical_name(name, self.architecture) for name in self.tensors if name != "rope_freqs.weight"]

    def weights(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Each weight by canonical name, dequantised to `dtype` on the CPU, one in memory at a time."""
        for name in self.tensors:
            if name != "rope_freqs.weight":
                yield canonical_name(name, self.architecture), self.read(name, dtype)

    def packed_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each weight by canonical name: matrices packed as they are stored (`ops.packed`), all else in bf16."""
        for name, info in self.tensors.items():
            if name == "rope_freqs.weight":
                continue
            if len(info.shape) != 2:
                tensor = self.read(name, torch.bfloat16)
            elif info.type_id in TYPES:
                rows = torch.from_numpy(self._stored(name).copy())
                tensor = pack(rows, info.type_id, info.shape[1])
            else:  # not quantised
                tensor = pack(self.read(name, torch.bfloat16), BF16, info.shape[1])
            yield canonical_name(name, self.architecture), tensor

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(info.num_rows * info.row_bytes for info in self.tensors.values())

    def _stored(self, name: str) -> Any:
        """[rows, bytes of a row] as in the file; q and k of the `llama` architecture in Hugging Face's row order."""
        import numpy as np

        info = self.tensors[name]
        shape = (info.num_rows, info.row_bytes)
        stored = np.memmap(self.parts[info.part], np.uint8, "r", info.offset, shape)
        if self.architecture == "llama" and (heads := self._rotated_heads(name)):
            return _unpermute(stored.reshape(info.shape[0], -1), heads, name).reshape(shape)
        return stored

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The tensor of that GGUF name, dequantised."""
        import numpy as np
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        info = self.tensors[name]
        rows, raw = info.num_rows, self._stored(name)
        out = torch.empty(rows, info.shape[-1], dtype=dtype)
        quantised = GGMLQuantizationType(info.type_id)
        step = max(1, CHUNK_ELEMENTS // info.shape[-1])

        def convert(start: int) -> None:
            chunk = dequantize(np.array(raw[start : start + step]), quantised)  # a writable copy
            out[start : start + step] = torch.from_numpy(np.asarray(chunk, dtype=np.float32))

        starts = range(0, rows, step)
        if len(starts) == 1:
            convert(0)
        else:
            with ThreadPoolExecutor(max_workers=max(1, min(4, torch.get_num_threads()))) as pool:
                list(pool.map(convert, starts))
        return out.reshape(info.shape)

    def _rotated_heads(self, name: str) -> int | None:
        """Heads in a query or key projection (weight or bias), None for every other tensor."""
        kind = re.fullmatch(r"blk\.\d+\.attn_([qk])\.(weight|bias)", name)
        if kind is None:
            return None
        heads = self.metadata["llama.attention.head_count"]
        count = heads if kind[1] == "q" else self.metadata.get("llama.attention.head_count_kv", heads)
        return int(count[0] if isinstance(count, list) else count)


def open_gguf(path: str | Path) -> GgufFile:
    """Open a GGUF file, or a model split over several, and check all of its parts.

    Raises PacelineError for a file that is missing, cut short, not GGUF, of the wrong byte order or version,
    split with a part missing, or that holds a tensor type not in `gguf_header.TENSOR_TYPES`.
    """
    path = Path(path)
    first = parse_header(path, 0)
    count = Metadata(path, first.metadata, "split.").whole("count") or 1
    if count <= 1:
        return GgufFile((path,), first.metadata, first.tensors)
    paths = _split_paths(path, count)
    headers = [parse_header(part, index) for index, part in enumerate(paths)]
    tensors: dict[str, TensorInfo] = {}
    for index, (part, header) in enumerate(zip(paths, headers, strict=True)):
        number, of = header.metadata.get("split.no"), header.metadata.get("split.count")
        if number != index or of != count:
            raise PacelineError(
                f"{part}: holds part {_ordinal(number)} of {of}, its name says {index + 1} of {count}",
                hint="the parts were renamed or mixed; download the model again",
            )
        for name in header.tensors:
            if name in tensors:
                raise PacelineError(f"{part}: tensor {shown(name)} is in another part as well", hint=REDOWNLOAD)
        tensors.update(header.tensors)
    expected = headers[0].metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise PacelineError(
            f"{paths[0]}: {len(tensors)} tensors in {count} parts, split.tensors.count says {expected}",
            hint=REDOWNLOAD,
        )
    return GgufFile(paths, headers[0].metadata, tensors)


def canonical_name(name: str, architecture: str) -> str:
    """Hugging Face's name of a GGUF tensor; one that has none keeps its own, for the loader to report."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    names = _SANDWICH_NAMES if architecture == "gemma3" else _BLOCK_NAMES
    if block is None or block[2] not in names:
        return name
    return f"model.layers.{block[1]}.{names[block[2]]}.{block[3]}"


_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SANDWICH_NAMES = _BLOCK_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def _unpermute(rows: Any, heads: int, name: str) -> Any:
    """Undo the converter's reordering of rotary rows: it interleaves a head's halves, HF has them in turn.

    `rows` is [heads × head_dim, bytes of a row]: reordered before dequantisation there is less to move.
    """
    if rows.shape[0] % (2 * heads):
        raise PacelineError(f"tensor {shown(name)} has {rows.shape[0]} rows, which {heads} heads do not divide")
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def _ordinal(number: Any) -> Any:
    return number + 1 if isinstance(number, int) else number


def _split_paths(path: Path, count: int) -> tuple[Path, ...]:
    named = _SPLIT_NAME.fullmatch(path.name)
    if named is None or int(named["count"]) != count:
        raise PacelineError(
            f"{path}: is one of {count} parts, but is not named …-00001-of-{count:05d}.gguf",
            hint="keep the parts' original names, all in one folder",
        )
    paths = tuple(path.with_name(f"{named['stem']}-{i + 1:05d}-of-{count:05d}.gguf") for i in range(count))
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        raise PacelineError(
            f"{path}: part {', '.join(missing)} is missing",
            hint=f"put all {count} parts into {path.parent}",
        )
    return paths
