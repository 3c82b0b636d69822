"""Experts in MXFP4 (OCP Microscaling Formats 1.0), as gpt_oss is published, unpacked slice by slice as they are read.

NAME_blocks [E, O, I/32, 16] uint8    two values of 4 bits a byte, the first one in the low bits
NAME_scales [E, O, I/32] uint8        the exponent that 32 values share, plus 127

together are NAME [E, I, O], transposed as a checkpoint without quantization has it
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxpar.checkpoint.reader import TensorInfo
from jaxpar.checkpoint.safetensors_reader import DTYPES, SafetensorsReader
from jaxpar.errors import CheckpointError

_PACKED = DTYPES | {"U8": np.dtype(np.uint8)}
_BLOCKS, _SCALES = "_blocks", "_scales"
_GROUP, _BYTES = 32, 16
"""Values that share a scale, and the bytes that hold them."""
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], np.float32)
_NAN, _BIAS = 255, 127


class Mxfp4Reader:
    """The tensors of a model directory (see TensorReader); those that are packed appear as bfloat16, which is exact.

    Raises:
        CheckpointError: as `SafetensorsReader`; blocks without scales, or of shapes that do not fit.
    """

    def __init__(self, directory: Path) -> None:
        self._files = SafetensorsReader(directory, _PACKED)
        try:
            names = self._files.names()
            self._packed = {name.removesuffix(_BLOCKS) for name in names if name.endswith(_BLOCKS)}
            for name in self._packed:
                self._check(name)
        except CheckpointError:
            self.close()
            raise

    def names(self) -> Collection[str]:
        """Every tensor's name."""
        packed = {name + part for name in self._packed for part in (_BLOCKS, _SCALES)}
        return {*self._files.names()} - packed | self._packed

    def info(self, name: str) -> TensorInfo:
        """Shape, element type and file of a tensor (see TensorReader)."""
        if name in self._packed:
            blocks = self._files.info(name + _BLOCKS)
            experts, outputs, groups, _ = blocks.shape
            return TensorInfo((experts, groups * _GROUP, outputs), np.dtype(ml_dtypes.bfloat16), blocks.file)
        info = self._files.info(name)
        if info.dtype == np.uint8:
            raise CheckpointError(
                f"{info.file}: tensor {name} is U8, which only {_BLOCKS} and {_SCALES} of experts may be; "
                "fetch the weights again"
            )
        return info

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """The slice `index` of a tensor (see TensorReader)."""
        if name not in self._packed:
            return self._files.read(name, index)
        where = [slice(0, size) for size in self.info(name).shape]
        where[: len(index)] = index
        experts, inputs, outputs = where
        groups = slice(inputs.start // _GROUP, -(-inputs.stop // _GROUP))
        blocks, scales = (self._files.read(name + part, (experts, outputs, groups)) for part in (_BLOCKS, _SCALES))
        codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:3], _GROUP)
        exponents = scales.astype(np.int32)[..., None]
        with np.errstate(over="ignore"):  # a scale of 2^127 is a number, and six times as much is infinite
            values = np.where(exponents == _NAN, np.nan, np.ldexp(_VALUES[codes], exponents - _BIAS))
        rows = values.reshape(*blocks.shape[:2], -1).transpose(0, 2, 1)
        first = groups.start * _GROUP
        return rows[:, inputs.start - first : inputs.stop - first].astype(ml_dtypes.bfloat16)

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def _check(self, name: str) -> None:
        blocks, scales = self._files.info(name + _BLOCKS), self._files.info(name + _SCALES)
        if blocks.dtype != np.uint8 or len(blocks.shape) != 4 or blocks.shape[3] != _BYTES:
            raise CheckpointError(
                f"{blocks.file}: tensor {name}{_BLOCKS} is {blocks.dtype} {list(blocks.shape)}, expected uint8 "
                f"[experts, outputs, inputs / {_GROUP}, {_BYTES}]; fetch it again"
            )
        if scales.dtype != np.uint8 or scales.shape != blocks.shape[:3]:
            raise CheckpointError(
                f"{scales.file}: tensor {name}{_SCALES} is {scales.dtype} {list(scales.shape)}, expected uint8 "
                f"{list(blocks.shape[:3])}, a scale for each {_GROUP} values; fetch it again"
            )
