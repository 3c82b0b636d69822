"""Weights in safetensors: `model.safetensors`, or shards that `model.safetensors.index.json` lists.

A file is: 8 bytes of header length, a JSON header {name: {dtype, shape, data_offsets}}, the data. It is parsed here
since the library tells no offsets, without which exact byte ranges cannot be read (see ByteRanges).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxpar.checkpoint.byte_ranges import ByteRanges
from jaxpar.checkpoint.fields import MAX_INTEGER, Fields
from jaxpar.checkpoint.files import parse_json, path_inside, read_json
from jaxpar.checkpoint.reader import TensorInfo
from jaxpar.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
MAX_AXES = 8


@dataclass(frozen=True)
class _Tensor:
    dtype: str
    shape: tuple[int, ...]
    offset: int
    file: ByteRanges


class SafetensorsReader:
    """The tensors of a model directory (see TensorReader), of the element types `dtypes` by their names in a header.

    Raises:
        CheckpointError: if the directory has no weights in this format, the index names a file or a tensor that is
            not there, a path leads out of the directory, or a file is truncated or has a broken header.
    """

    def __init__(self, directory: Path, dtypes: Mapping[str, np.dtype] = DTYPES) -> None:
        self._dtypes = dtypes
        self._files: list[ByteRanges] = []
        try:
            self._tensors = self._open(directory)
        except CheckpointError:
            self.close()
            raise
        self._directory = directory

    def names(self) -> Collection[str]:
        """Every tensor's name."""
        return self._tensors.keys()

    def info(self, name: str) -> TensorInfo:
        """Shape, element type and file of a tensor (see TensorReader)."""
        tensor = self._find(name)
        return TensorInfo(tensor.shape, self._dtypes[tensor.dtype], tensor.file.path)

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """The slice `index` of a tensor (see TensorReader)."""
        tensor = self._find(name)
        return tensor.file.read_array(tensor.offset, tensor.shape, self._dtypes[tensor.dtype], index)

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()

    def _find(self, name: str) -> _Tensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise CheckpointError(
                f"{self._directory}: tensor {name} is missing among {len(self._tensors)} tensors; fetch the weights "
                "and config.json again, of the same model"
            )
        if tensor.dtype not in self._dtypes:
            raise CheckpointError(
                f"{tensor.file.path}: tensor {name} is {tensor.dtype}, expected one of {', '.join(self._dtypes)}; "
                "convert the checkpoint to one of these"
            )
        return tensor

    def _open(self, directory: Path) -> dict[str, _Tensor]:
        single, index = path_inside(directory, SINGLE_FILE), path_inside(directory, INDEX_FILE)
        if single.exists():
            return self._open_file(single)
        if not index.exists():
            raise CheckpointError(f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}; fetch the weights")
        return self._open_shards(directory, index)

    def _open_shards(self, directory: Path, index: Path) -> dict[str, _Tensor]:
        weight_map = Fields(read_json(index), index).section("weight_map")
        if weight_map is None or not weight_map.values or not all(type(f) is str for f in weight_map.values.values()):
            raise CheckpointError(
                f"{index}: weight_map is missing or empty, expected tensor names with file names; fetch it again"
            )
        files: dict[str, dict[str, _Tensor]] = {}
        tensors = {}
        for name, file in weight_map.values.items():
            if file not in files:
                path = path_inside(directory, file)
                if not path.exists():
                    raise CheckpointError(
                        f"{path} is absent, and {INDEX_FILE} names it for tensor {name}; fetch it again"
                    )
                files[file] = self._open_file(path)
            if name not in files[file]:
                raise CheckpointError(
                    f"{directory / file} holds no tensor {name}, which {INDEX_FILE} says it does; fetch both again"
                )
            tensors[name] = files[file][name]
        return tensors

    def _open_file(self, path: Path) -> dict[str, _Tensor]:
        file = ByteRanges(path)
        self._files.append(file)
        length = int.from_bytes(file.read_bytes(0, 8), "little")
        if length > min(MAX_HEADER_BYTES, file.size - 8):
            raise CheckpointError(
                f"{path}: a header of {length} bytes in a file of {file.size}; it is truncated or no safetensors file, "
                "fetch it again"
            )
        header = parse_json(file.read_bytes(8, length), path)
        header.pop("__metadata__", None)
        return {name: self._parse_entry(name, entry, file, data=8 + length) for name, entry in header.items()}

    def _parse_entry(self, name: str, entry: Any, file: ByteRanges, data: int) -> _Tensor:
        """One tensor of a header whose data begin at byte `data`; its bytes are all in the file."""
        if type(entry) is not dict:
            raise CheckpointError(f"{file.path}: the header's entry of tensor {name} is no object; fetch it again")
        fields = Fields(entry, file.path, f"{name}: ")
        shape, offsets = fields.items("shape", int), fields.items("data_offsets", int)
        dtype = fields.string("dtype", None)
        if dtype is None:
            raise fields.error("dtype", "an element type")
        if shape is None or len(shape) > MAX_AXES or not all(0 <= size <= MAX_INTEGER for size in shape):
            raise fields.error("shape", f"a list of at most {MAX_AXES} sizes")
        if offsets is None or len(offsets) != 2 or not 0 <= offsets[0] <= offsets[1]:
            raise fields.error("data_offsets", "[begin, end]")
        begin, end = offsets
        if data + end > file.size:
            raise CheckpointError(
                f"{file.path} ends at byte {file.size}, and tensor {name} at {data + end}; it is truncated, "
                "fetch it again"
            )
        if dtype in self._dtypes and end - begin != math.prod(shape) * self._dtypes[dtype].itemsize:
            expected = math.prod(shape) * self._dtypes[dtype].itemsize
            raise CheckpointError(
                f"{file.path}: tensor {name} has {end - begin} bytes, expected {expected} for {dtype} of shape "
                f"{shape}; fetch it again"
            )
        return _Tensor(dtype, tuple(shape), data + begin, file)
