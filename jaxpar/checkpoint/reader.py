"""What every reader of weights offers, whatever the file format."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class TensorInfo:
    """Shape and element type with which a tensor is read, and the file that holds it."""

    shape: tuple[int, ...]
    dtype: np.dtype
    file: Path


class TensorReader(Protocol):
    """Named tensors in files, read slice by slice; names are those of Hugging Face checkpoints.

    Reading allocates the result and little else, so that a process holds one shard at a time.
    """

    def names(self) -> Collection[str]:
        """Every tensor's name."""
        ...

    def info(self, name: str) -> TensorInfo:
        """Shape, element type and file of a tensor, without reading it.

        Raises:
            CheckpointError: if there is no such tensor, or its element type is none that can be read.
        """
        ...

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """The slice `index` of a tensor: ranges of step 1 inside the shape; trailing axes may be left out.

        Raises:
            CheckpointError: as `info`, or if the file does not hold the bytes.
            ValueError: if `index` is not one of the tensor's.
        """
        ...

    def close(self) -> None:
        """Close the files; nothing can be read after it."""
        ...
