"""The header of a GGUF file: metadata, and where each tensor lies.

Layout (little-endian): magic, version, counts; metadata as (key, type, value); tensors as (name, sizes, ggml type,
offset), the innermost size first; the data, aligned. Parsed here and not by `gguf.GGUFReader`, which keeps several
numpy views for every token and merge (160 MB and 1.7 s for a vocabulary of 49152) and trusts the lengths that the file
states. The `gguf` library gives block sizes and dequantizes.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from jaxpar.checkpoint.byte_ranges import ByteRanges
from jaxpar.checkpoint.fields import MAX_INTEGER
from jaxpar.errors import CheckpointError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS: dict[int, np.dtype] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_MAX_AXES = 4


@dataclass(frozen=True)
class GgufTensor:
    """One tensor as stored: `shape` in row-major order, `kind` its ggml type, `offset` the byte where it begins.

    A row (the last axis) is stored as blocks of `block_size` values in `block_bytes` bytes each.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    block_size: int
    block_bytes: int
    offset: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.shape[-1] // self.block_size * self.block_bytes


class GgufFile:
    """An open GGUF file: `metadata` by key (arrays as lists) and `tensors` by their names in the file.

    Raises:
        CheckpointError: if the file is not GGUF, is of a version or byte order that is not read, is truncated, or
            describes tensors that it does not hold; or if the `gguf` library is not installed.
    """

    def __init__(self, path: Path) -> None:
        self.gguf = import_gguf(path)
        self.ranges = ByteRanges(path)
        try:
            cursor = _Cursor(self.ranges)
            self.metadata, self.tensors = _parse(cursor, self.gguf)
        except CheckpointError:
            self.ranges.close()
            raise
        self.path = path


def import_gguf(path: Path) -> ModuleType:
    """The `gguf` library, which is an optional dependency.

    Raises:
        CheckpointError: if it is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise CheckpointError(f"{path}: GGUF files need the gguf library: pip install 'jaxpar[gguf]'") from error
    return gguf


class _Cursor:
    """Reads a header field by field; a length that the file states is checked against what is left of the file."""

    def __init__(self, file: ByteRanges) -> None:
        self.file = file
        self.position = 0
        self._buffer = b""
        self._buffer_start = 0

    def take(self, length: int) -> bytes:
        begin = self.position - self._buffer_start
        if begin + length > len(self._buffer):
            window = min(max(length, 1 << 20), self.file.size - self.position)
            self._buffer = self.file.read_bytes(self.position, max(window, length))
            self._buffer_start, begin = self.position, 0
        self.position += length
        return self._buffer[begin : begin + length]

    def unpack(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))

    def integer(self, layout: str) -> int:
        return int(self.unpack(layout)[0])

    def count(self, item_bytes: int) -> int:
        """A number of items that take at least `item_bytes` each."""
        count = self.integer("<Q")
        if count * item_bytes > self.file.size - self.position:
            raise self.error(f"{count} items cannot follow in a file of {self.file.size} bytes")
        return count

    def string(self) -> str:
        data = self.take(self.count(1))
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error("a string is not UTF-8") from error

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item_kind = self.integer("<I")
            if item_kind == _STRING:
                return [self.string() for _ in range(self.count(8))]
            dtype = self._scalar(item_kind)
            return np.frombuffer(self.take(self.count(dtype.itemsize) * dtype.itemsize), dtype).tolist()
        dtype = self._scalar(kind)
        return np.frombuffer(self.take(dtype.itemsize), dtype)[0].item()

    def _scalar(self, kind: int) -> np.dtype:
        dtype = _SCALARS.get(kind)
        if dtype is None:
            raise self.error(f"metadata type {kind} is unknown")
        return dtype

    def error(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.file.path}: at byte {self.position} {what}; the file is truncated or corrupt, fetch it again"
        )


def _parse(cursor: _Cursor, gguf: ModuleType) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    path = cursor.file.path
    if cursor.file.size < 24 or (magic := cursor.take(4)) != _MAGIC:
        found = "an almost empty file" if cursor.file.size < 24 else repr(magic)
        raise CheckpointError(f"{path} is not a GGUF file: it begins with {found}, expected {_MAGIC!r}; fetch it again")
    version = cursor.integer("<I")
    if version not in _VERSIONS:
        raise CheckpointError(
            f"{path}: GGUF version {version}, expected 2 or 3, little-endian; convert the model again"
        )
    tensor_count, key_count = cursor.count(24), cursor.count(12)

    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.integer("<I"))
    entries = [_tensor_entry(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1:
        raise CheckpointError(f"{path}: general.alignment is {alignment!r}, expected a positive integer")
    data = -(-cursor.position // alignment) * alignment
    tensors = {name: _tensor(cursor.file, gguf, name, shape, kind, data + at) for name, shape, kind, at in entries}
    return metadata, tensors


def _tensor_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    axes = cursor.integer("<I")
    if not 1 <= axes <= _MAX_AXES:
        raise cursor.error(f"tensor {name} has {axes} axes, expected 1 to {_MAX_AXES}")
    sizes = cursor.unpack(f"<{axes}Q")
    if not all(1 <= size <= MAX_INTEGER for size in sizes):
        raise cursor.error(f"tensor {name} has the sizes {sizes}, expected 1 to {MAX_INTEGER}")
    return name, sizes[::-1], cursor.integer("<I"), cursor.integer("<Q")


def _tensor(
    file: ByteRanges, gguf: ModuleType, name: str, shape: tuple[int, ...], kind: int, offset: int
) -> GgufTensor:
    try:
        ggml_type = gguf.GGMLQuantizationType(kind)
    except ValueError as error:
        raise CheckpointError(f"{file.path}: tensor {name} has the unknown ggml type {kind}; upgrade gguf") from error
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[ggml_type]
    if shape[-1] % block_size:
        raise CheckpointError(
            f"{file.path}: tensor {name} of shape {shape} is not divisible into {ggml_type.name} blocks of {block_size}"
            "; convert the model again"
        )
    tensor = GgufTensor(name, shape, ggml_type.name, block_size, block_bytes, offset)
    end = offset + math.prod(shape[:-1]) * tensor.row_bytes
    if end > file.size:
        raise CheckpointError(
            f"{file.path} ends at byte {file.size}, and tensor {name} at {end}; it is truncated, fetch it again"
        )
    return tensor
