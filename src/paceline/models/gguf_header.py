"""A GGUF file's header: metadata and tensor table, checked against the file's size before a weight is read.

Parsed here rather than by `gguf.GGUFReader`, which cannot say which tensor or type it stumbled over, and
takes seconds for a vocabulary of 262k tokens. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.values import shown

MAGIC = b"GGUF"
REDOWNLOAD = "the file is damaged or its download was cut short; download it again"


@dataclass(frozen=True, slots=True)
class TensorType:
    name: str
    block_elements: int
    block_bytes: int


# ggml's ids; sizes as in ggml-common.h (checked against gguf-py by a test)
TENSOR_TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    30: TensorType("BF16", 1, 2),
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One row of the tensor table. `shape` is in torch's order, slowest dimension first."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    part: int  # index into GgufFile.parts
    offset: int  # of its first byte in that file

    @property
    def type(self) -> TensorType:
        return TENSOR_TYPES[self.type_id]

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.type.block_elements * self.type.block_bytes

    @property
    def num_rows(self) -> int:
        rows = 1
        for size in self.shape[:-1]:
            rows *= size
        return rows


@dataclass(frozen=True, slots=True)
class Header:
    """One file's metadata and tensor table; every tensor's bytes are known to lie inside the file."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9


class _Reader:
    """A cursor over the mapped file; a read past its end raises struct.error, which means: cut short."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at, self.size = data, 0, len(data)

    def scalar(self, format: str) -> Any:
        (value,) = struct.unpack_from(format, self.data, self.at)
        self.at += struct.calcsize(format)
        return value

    def string(self) -> str:
        length = self.scalar("<Q")
        start, self.at = self.at, self.at + length
        if self.at > self.size:
            raise struct.error("string beyond the end")
        return self.data[start : self.at].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item, length = self.scalar("<I"), self.scalar("<Q")
            if item in _SCALARS:
                return self._numbers(_SCALARS[item], length)
            if item == _ARRAY:
                raise ValueError("an array of arrays")
            if length > self.size - self.at:
                raise struct.error("array beyond the end")
            return [self.value(item) for _ in range(length)]
        if kind not in _SCALARS:
            raise ValueError(f"value type {kind} is unknown")
        return self.scalar(_SCALARS[kind])

    def _numbers(self, format: str, length: int) -> list[Any]:
        if length * struct.calcsize(format) > self.size - self.at:
            raise struct.error("array beyond the end")
        many = f"<{length}{format[1]}"
        values = list(struct.unpack_from(many, self.data, self.at))
        self.at += struct.calcsize(many)
        return values


def parse_header(path: Path, part: int) -> Header:
    if not path.is_file():
        raise PacelineError(f"{path}: no such file")
    if path.stat().st_size == 0:
        raise PacelineError(f"{path}: the file is empty", hint=REDOWNLOAD)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        reader = _Reader(data)
        if data[:4] != MAGIC:
            raise PacelineError(
                f"{path}: is not a GGUF file (it starts with {shown(data[:4])})",
                hint="give a .gguf file, a folder with safetensors, or a model id",
            )
        try:
            return _read_header(reader, path, part)
        except struct.error:
            raise PacelineError(
                f"{path}: cut short: its {reader.size} bytes end inside the header", hint=REDOWNLOAD
            ) from None
        except (UnicodeDecodeError, ValueError) as error:
            raise PacelineError(f"{path}: damaged header: {error}", hint=REDOWNLOAD) from None


def _read_header(reader: _Reader, path: Path, part: int) -> Header:
    reader.at = 4
    version = reader.scalar("<I")
    if version & 0xFFFF == 0:
        raise PacelineError(f"{path}: is a big-endian GGUF file", hint="get the little-endian file of the model")
    if version not in (2, 3):
        raise PacelineError(f"{path}: GGUF version {version} is not supported", hint="supported: 2 and 3")
    num_tensors, num_values = reader.scalar("<Q"), reader.scalar("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = reader.string()
        metadata[key] = reader.value(reader.scalar("<I"))
    table = [_tensor_entry(reader, part) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0:
        raise ValueError(f"general.alignment is {shown(alignment)}")
    start = -(-reader.at // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for entry in table:
        if entry.name in tensors:
            raise ValueError(f"tensor {shown(entry.name)} is listed twice")
        tensors[entry.name] = _checked(entry, start, reader.size, path)
    return Header(metadata, tensors)


def _tensor_entry(reader: _Reader, part: int) -> TensorInfo:
    name = reader.string()
    dims = [reader.scalar("<Q") for _ in range(reader.scalar("<I"))]
    return TensorInfo(name, tuple(reversed(dims)), reader.scalar("<I"), part, reader.scalar("<Q"))


def _checked(entry: TensorInfo, data_start: int, file_size: int, path: Path) -> TensorInfo:
    if entry.type_id not in TENSOR_TYPES:
        raise PacelineError(
            f"{path}: tensor {shown(entry.name)} is of type {_type_name(entry.type_id)}, which is not supported",
            hint=f"supported: {', '.join(t.name for t in TENSOR_TYPES.values())}",
        )
    if not entry.shape or min(entry.shape) < 1 or entry.shape[-1] % entry.type.block_elements:
        raise ValueError(f"tensor {shown(entry.name)} of type {entry.type.name} has shape {list(entry.shape)}")
    offset = data_start + entry.offset
    end = offset + entry.num_rows * entry.row_bytes
    if end > file_size:
        raise PacelineError(
            f"{path}: cut short: tensor {shown(entry.name)} ends at byte {end}, the file has {file_size}",
            hint=REDOWNLOAD,
        )
    return replace(entry, offset=offset)


def _type_name(type_id: int) -> str:
    from gguf.constants import GGMLQuantizationType

    known = {int(kind): kind.name for kind in GGMLQuantizationType}
    return f"{known[type_id]} ({type_id})" if type_id in known else str(type_id)
