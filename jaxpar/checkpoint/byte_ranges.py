"""Reading slices of a row-major array straight from its bytes in a file."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxpar.checkpoint.files import file_size, one_line
from jaxpar.errors import CheckpointError


class ByteRanges:
    """An open file of which exact byte ranges are read with `pread` into the arrays that they are for.

    Not `mmap`: its pages count as this process's memory (eight slices of a 1 GiB tensor leave 1 GiB resident), and a
    file that shrinks under a map kills the process where `pread` reports it. Not `safetensors.safe_open` either: it
    maps the file or, with its `pread` backend, reads a whole tensor for each slice of it.

    Raises:
        CheckpointError: if there is no such file, or it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = file_size(path)
        try:
            self._fd = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be opened: {one_line(error)}") from error
        self.close = weakref.finalize(self, os.close, self._fd)

    def read_bytes(self, offset: int, length: int) -> bytes:
        """`length` bytes from `offset` on; allocates nothing for a range that the file does not have.

        Raises:
            CheckpointError: if the file ends before.
        """
        if offset + length > self.size:
            raise CheckpointError(
                f"{self.path} ends at byte {self.size}, expected {offset + length}; it is truncated, fetch it again"
            )
        buffer = bytearray(length)
        self._fill(memoryview(buffer), offset)
        return bytes(buffer)

    def read_array(self, offset: int, shape: Sequence[int], dtype: np.dtype, index: tuple[slice, ...]) -> np.ndarray:
        """The slice `index` of the little-endian array of `shape` that begins at byte `offset`.

        One read for each run of bytes that is contiguous in the file: rows of a matrix are one run, columns one run a
        row. Nothing is allocated but the result.

        Raises:
            CheckpointError: if the file ends before.
            ValueError: if `index` is not one of the array's (see `bounds_of`).
        """
        bounds = bounds_of(index, shape)
        result = np.empty([stop - start for start, stop in bounds], dtype)
        if result.size == 0:
            return result
        strides = [math.prod(shape[axis + 1 :]) * dtype.itemsize for axis in range(len(shape))]
        # Axes after `cut` are taken whole, so that a run is a range of axis `cut`; the axes before it are walked.
        cut = max((axis for axis, bound in enumerate(bounds) if bound != (0, shape[axis])), default=0)
        walked = [
            range(low * stride, high * stride, stride)
            for (low, high), stride in zip(bounds[:cut], strides[:cut], strict=True)
        ]
        first = offset + (bounds[cut][0] * strides[cut] if shape else 0)
        starts = [first + sum(steps) for steps in itertools.product(*walked)]

        if len(starts) > 1 and sys.platform == "linux":
            # Small strided reads defeat the kernel's readahead on a cold file: 3.3 s against 1.1 s a GiB.
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._fd, starts[0], starts[-1] - starts[0], os.POSIX_FADV_WILLNEED)
        runs = result.reshape(-1).view(np.uint8).reshape(len(starts), -1)
        for run, start in zip(runs, starts, strict=True):
            self._fill(run.data, start)
        return result

    def _fill(self, buffer: memoryview, offset: int) -> None:
        done = 0
        while done < len(buffer):  # one call reads at most 2 GiB
            try:
                count = os.preadv(self._fd, [buffer[done:]], offset + done)
            except OSError as error:
                raise CheckpointError(f"{self.path} cannot be read: {one_line(error)}") from error
            if count == 0:
                raise CheckpointError(
                    f"{self.path} ends at byte {offset + done}; it was truncated while being read, fetch it again"
                )
            done += count


def bounds_of(index: tuple[slice, ...], shape: Sequence[int]) -> list[tuple[int, int]]:
    """(start, stop) of `index` along every axis of an array of `shape`; trailing axes may be left out.

    Raises:
        ValueError: if `index` has a step, more axes than the array, or leaves it: padding is the caller's work.
    """
    if len(index) > len(shape):
        raise ValueError(f"index {index} has {len(index)} axes, the array of shape {tuple(shape)} has {len(shape)}")
    bounds = []
    for axis, size in enumerate(shape):
        piece = index[axis] if axis < len(index) else slice(None)
        start = 0 if piece.start is None else piece.start
        stop = size if piece.stop is None else piece.stop
        if piece.step not in (None, 1) or not 0 <= start <= stop <= size:
            raise ValueError(f"{piece} is not a range of axis {axis} of an array of shape {tuple(shape)}")
        bounds.append((start, stop))
    return bounds
