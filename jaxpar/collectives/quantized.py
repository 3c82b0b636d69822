"""Two-shot sums whose messages are codes of one byte with a float32 scale for each block of up to 128 values of a row.

    each rank's part -> blocks -> | codes | scales |  all-to-all   -> values, added up in float32 by the part's owner
    the owner's sum  -> blocks -> | codes | scales |  all-gather   -> values of the same bytes, and so the same bits

    row 0 of 300 values    [ 100 ][ 100 ][ 100 ]      blocks are whole blocks of a row, as even as they can be,
    row 1                  [ 100 ][ 100 ][ 100 ]      and so many that none is of more than 128 values

A row's sum depends on that row alone: a request never feels its neighbours, nor an infinity or NaN of theirs. Both
halves send at best 132 bytes for 128 values. A rank's own part goes through codes as well, so that no rank knows better
than its neighbours. Zero++ (arXiv:2306.10209) and Flash Communication (arXiv:2412.04964) send like this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpar.collectives.bounds import least, rounding
from jaxpar.collectives.fixed_order import in_rank_order
from jaxpar.collectives.move import all_to_all, gather_same
from jaxpar.collectives.parts import part_size, ranks_of
from jaxpar.collectives.reduction import Axes, Message, Operation, Reduction

BLOCK = 128
"""The most values that share a scale."""

_SCALE_BYTES = 4
_LEAST_SCALE = float(np.finfo(np.float32).tiny)


class Codes(NamedTuple):
    """A kind of code: its dtype, the largest value, how float32 within [-largest, largest] become codes, and the error.

    `error` is the largest distance between a value and its code, for values up to `largest`.
    """

    name: str
    dtype: Any
    largest: float
    encode: Callable[[jax.Array], jax.Array]
    error: float


def quantized(codes: Codes) -> Reduction:
    """The two-shot sum whose messages are these codes, and its halves."""

    def scatter(blocks: jax.Array, axes: Axes) -> jax.Array:
        """[P * N, values] -> the rank's part of the sum [N, values] float32."""
        packed = _packed(blocks.reshape(lax.axis_size(axes), -1, blocks.shape[1]), codes)
        return in_rank_order(_values(all_to_all(packed, axes, 0, 0), blocks.shape[1], codes))

    def gather(part: jax.Array, axes: Axes) -> jax.Array:
        """[N, values] float32 -> [P * N, values] of all ranks, as codes have them."""
        packed = gather_same(_packed(part[None], codes), axes)
        return _values(packed, part.shape[1], codes).reshape(-1, part.shape[1])

    def all_reduce(x: jax.Array, axes: Axes) -> jax.Array:
        if not axes:
            return x
        blocks = _in_blocks(x)
        filled = jnp.pad(blocks, ((0, -len(blocks) % lax.axis_size(axes)), (0, 0)))
        return _in_rows(gather(scatter(filled, axes), axes)[: len(blocks)], x.shape).astype(x.dtype)

    def reduce_scatter(x: jax.Array, axes: Axes) -> jax.Array:
        if not axes:
            return x
        shape = (len(x) // lax.axis_size(axes), *x.shape[1:])
        return _in_rows(scatter(_in_blocks(x), axes), shape).astype(x.dtype)

    def all_gather(x: jax.Array, axes: Axes) -> jax.Array:
        if not axes:
            return x
        shape = (len(x) * lax.axis_size(axes), *x.shape[1:])
        return _in_rows(gather(_in_blocks(x), axes), shape).astype(x.dtype)

    def error_bound(parts: np.ndarray, dtype: Any) -> np.ndarray:
        return _error_bound(codes, parts, dtype)

    return Reduction(codes.name, all_reduce, reduce_scatter, all_gather, _messages, error_bound)


def _blocks_of(width: int) -> tuple[int, int]:
    """(blocks of a row of `width` values, values of each): the last one may have to be filled up."""
    blocks = -(-width // BLOCK)
    return blocks, -(-width // blocks)


def _in_blocks(x: Any, numpy: Any = jnp) -> Any:
    """Rows [..., width] -> [blocks of all rows, values], filled up with zeros."""
    width = (1, *x.shape)[-1]
    blocks, values = _blocks_of(width)
    return numpy.pad(x.reshape(-1, width), ((0, 0), (0, blocks * values - width))).reshape(-1, values)


def _in_rows(blocks: Any, shape: tuple[int, ...]) -> Any:
    """[blocks of all rows, values] -> the array of `shape` that was cut into them."""
    width = (1, *shape)[-1]
    return blocks.reshape(-1, math.prod(_blocks_of(width)))[:, :width].reshape(shape)


def _packed(blocks: jax.Array, codes: Codes) -> jax.Array:
    """[P, N, values] -> bytes [P, N * (values + 4)], each row the codes and then the scales."""
    blocks = blocks.astype(jnp.float32)
    # A block of zeros has a scale, too, and one so small that its scale would not be a normal number has the least.
    scales = jnp.maximum(jnp.abs(blocks).max(axis=-1) / codes.largest, _LEAST_SCALE)
    scaled = jnp.clip(blocks / scales[..., None], -codes.largest, codes.largest)
    as_bytes = [lax.bitcast_convert_type(part, jnp.uint8) for part in (codes.encode(scaled), scales)]
    return jnp.concatenate([part.reshape(len(blocks), -1) for part in as_bytes], axis=1)


def _values(packed: jax.Array, values: int, codes: Codes) -> jax.Array:
    """What `_packed` made -> [P, N, values] float32."""
    blocks = packed.shape[1] // (values + _SCALE_BYTES)
    code = lax.bitcast_convert_type(packed[:, : blocks * values].reshape(-1, blocks, values), codes.dtype)
    scales = lax.bitcast_convert_type(packed[:, blocks * values :].reshape(-1, blocks, _SCALE_BYTES), jnp.float32)
    return code.astype(jnp.float32) * scales[..., None]


def _messages(operation: Operation, rows: int, width: int, itemsize: int, sizes: Mapping[str, int]) -> list[Message]:
    ranks = ranks_of(sizes)
    blocks, values = _blocks_of(width)
    part = part_size(rows * blocks, 1 if operation == "all_gather" else ranks) * (values + _SCALE_BYTES)
    halves = {"reduce_scatter": Message("all_to_all", 1, ranks * part), "all_gather": Message("all_gather", 1, part)}
    return list(halves.values()) if operation == "all_reduce" else [halves[operation]]


def _error_bound(codes: Codes, parts: np.ndarray, dtype: Any) -> np.ndarray:
    """Of [P, ..., width] parts: the largest values of their blocks, once for each rank's part and once for the sum.

        e = error / largest of a code (int8: 1/254, fp8: 1/28)
        first half     e * (m_0 + ... + m_{P-1})         m_r: the largest |value| of rank r's block
        second half    e * (that bound + the largest |sum| of the block)

    So it grows with P as the sum does, and a huge value costs only its own block.
    """
    shape = parts.shape[1:]
    # All ranks cut the same blocks.
    largest = np.stack([_in_blocks(np.abs(part), np).max(axis=-1, keepdims=True) for part in parts])
    # A relative error of float32 in the scale and in the division moves a value to the next code at worst at a tie.
    relative = codes.error / codes.largest * (1 + 8 * float(np.finfo(np.float32).eps))
    floor = codes.error * _LEAST_SCALE + 2 * least(dtype)
    first = relative * largest.sum(axis=0) + len(parts) * floor
    second = relative * (largest.sum(axis=0) + first) + floor
    values = _blocks_of((1, *shape)[-1])[1]
    total = _in_rows(np.repeat(first + second, values, axis=1), shape) + rounding(parts, np.float32, 1)
    unit = float(jnp.finfo(dtype).eps) / 2
    return total * (1 + unit) + unit * np.abs(parts.sum(axis=0)) + least(dtype)
