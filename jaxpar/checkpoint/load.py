"""Puts a checkpoint onto the mesh: each device's slice is read from the file straight into its sharded array.

Host memory holds one slice of one weight at a time; on a CPU it becomes the array. Replicas of a slice are read once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxpar.checkpoint.reader import TensorReader
from jaxpar.errors import CheckpointError
from jaxpar.nn.weights import ZEROS, Entry, Source, Weight

_ALIGNMENT = 64
"""Bytes: XLA's alignment of arrays on a CPU."""

Slices = tuple[tuple[int, int], ...]


class Piece(NamedTuple):
    """Rows [at, at + size) of a slice are rows [start, start + size) of tensor number `tensor`."""

    tensor: int
    start: int
    at: int
    size: int


def load_weights(weights: Mapping[str, Weight], reader: TensorReader, mesh: Mesh) -> dict[str, jax.Array]:
    """Read every weight into an array with its PartitionSpec on `mesh`, in the weight's dtype.

    Raises:
        CheckpointError: a tensor that is missing or whose shape is not the one that the configuration asks for; all
            are checked before the first is read.
    """
    for weight in weights.values():
        for source in weight.sources:
            check_source(source, reader)
    return {name: _load(weight, reader, mesh) for name, weight in weights.items()}


def check_source(source: Source, reader: TensorReader) -> None:
    """Refuse a source whose tensors are not in the checkpoint with the shape that the configuration implies."""
    for tensor, shape in source.stored.items():
        info = reader.info(tensor)
        if info.shape != shape:
            raise CheckpointError(
                f"{info.file}: tensor {tensor} has shape {list(info.shape)}, but config.json asks for {list(shape)}; "
                f"the configuration and the weights are not of the same model, fetch both again"
            )


def _load(weight: Weight, reader: TensorReader, mesh: Mesh) -> jax.Array:
    shape, dtype = weight.abstract.shape, weight.abstract.dtype
    sharding = NamedSharding(mesh, weight.spec)
    holders: dict[Slices, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        bounds = tuple(s.indices(n)[:2] for s, n in zip(index or (), shape, strict=True))
        holders.setdefault(bounds, []).append(device)
    shards = []
    for bounds, devices in holders.items():
        local = read_slice(weight.sources, shape, bounds, reader, dtype)
        # Transfers run in the background: without waiting, the slices before this one would still be in host memory.
        shards += jax.block_until_ready([jax.device_put(local, device) for device in devices])
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def read_slice(
    sources: tuple[Source, ...], shape: tuple[int, ...], bounds: Slices, reader: TensorReader, dtype: np.dtype
) -> np.ndarray:
    """Values of the slice `bounds` of a weight of `shape`; before a source's own dimensions come stages and slots."""
    out = _aligned_zeros([stop - start for start, stop in bounds], dtype)
    outer = len(shape) - len(sources[0].shape)
    starts = [start for start, _ in bounds[:outer]]
    for place in np.ndindex(*out.shape[:outer]):
        index = 0
        for size, start, at in zip(shape, starts, place, strict=False):
            index = index * size + start + at
        _fill(out[place], sources[index], bounds[outer:], reader)
    return out


def _aligned_zeros(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Zeros whose memory a CPU device takes over as it is, where it would have to copy it otherwise."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def _fill(out: np.ndarray, source: Source, bounds: Slices, reader: TensorReader) -> None:
    for piece in pieces(source, *bounds[source.dim]):
        index = [slice(*bound) for bound in bounds]
        index[source.dim] = slice(piece.start, piece.start + piece.size)
        here = tuple(
            slice(piece.at, piece.at + piece.size) if dim == source.dim else slice(None) for dim in range(out.ndim)
        )
        name = source.tensors[piece.tensor]
        if source.entries:
            out[here] = _read_entry(source.entries[piece.tensor], name, index, reader)
        else:
            out[here] = reader.read(name, tuple(index))


def _read_entry(entry: Entry, name: str, index: list[slice], reader: TensorReader) -> np.ndarray:
    *columns, rows = reversed(index)
    if entry.turn is not None:
        rows = slice(2 * rows.start, 2 * rows.stop)
    values = reader.read(name, (slice(entry.index, entry.index + 1), *columns, rows))[0]
    return values[..., slice(entry.turn, None, None if entry.turn is None else 2)].T


def pieces(source: Source, start: int, stop: int) -> Iterator[Piece]:
    """Which rows of which tensors fill rows [start, stop) of a source; neighbours are joined, zeros are left out."""
    joined: Piece | None = None
    position = 0
    for block in source.blocks:
        first, last = max(start, position), min(stop, position + block.rows)
        offset = first - position
        position += block.rows
        if first >= last or block.tensor == ZEROS:
            continue
        begin = block.start + offset
        size = min(last - first, source.shapes[block.tensor][source.dim] - begin)
        if size <= 0:
            continue
        piece = Piece(block.tensor, begin, first - start, size)
        if joined and _continues(joined, piece):
            joined = joined._replace(size=joined.size + size)
            continue
        if joined:
            yield joined
        joined = piece
    if joined:
        yield joined


def _continues(a: Piece, b: Piece) -> bool:
    return a.tensor == b.tensor and a.start + a.size == b.start and a.at + a.size == b.at
