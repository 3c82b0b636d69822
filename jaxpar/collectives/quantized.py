"""Two-shot sums whose messages are codes of one byte with a float32 scale for each block of 128 values.

    each rank's part -> blocks -> | codes | scales |  all-to-all   -> values, added up in float32 by the part's owner
    the owner's sum  -> blocks -> | codes | scales |  all-gather   -> values of the same bytes, and so the same bits

Both halves send 132 bytes for 128 values. A rank's own part goes through codes as well, so that no rank knows better
than its neighbours. Zero++ (arXiv:2306.10209) and Flash Communication (arXiv:2412.04964) send like this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpar.collectives.bounds import least, rounding
from jaxpar.collectives.move import all_to_all, gather_same
from jaxpar.collectives.parts import in_parts, part_size, ranks_of, whole
from jaxpar.collectives.reduction import Axes, Message, Operation, Reduction

BLOCK = 128
"""Values that share a scale."""

_BLOCK_BYTES = BLOCK + 4
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

    def scatter(parts: jax.Array, axes: Axes) -> jax.Array:
        """[P, values, a multiple of BLOCK] -> the rank's part of the sum [values] float32."""
        return _values(all_to_all(_packed(parts, codes), axes, 0, 0), codes).sum(axis=0)

    def gather(part: jax.Array, axes: Axes) -> jax.Array:
        """[values, a multiple of BLOCK] float32 -> [P, values] of all ranks, as codes have them."""
        return _values(gather_same(_packed(part[None], codes), axes), codes)

    def all_reduce(x: jax.Array, axes: Axes) -> jax.Array:
        if not axes:
            return x
        parts = in_parts(x, lax.axis_size(axes), BLOCK)
        return whole(gather(scatter(parts, axes), axes), x.shape).astype(x.dtype)

    def reduce_scatter(x: jax.Array, axes: Axes) -> jax.Array:
        if not axes:
            return x
        parts = x.reshape(lax.axis_size(axes), -1)
        part = scatter(_filled_up(parts), axes)[: parts.shape[1]]
        return part.reshape(-1, *x.shape[1:]).astype(x.dtype)

    def all_gather(x: jax.Array, axes: Axes) -> jax.Array:
        if not axes:
            return x
        parts = gather(_filled_up(x.reshape(1, -1))[0], axes)[:, : x.size]
        return parts.reshape(-1, *x.shape[1:]).astype(x.dtype)

    def error_bound(parts: np.ndarray, dtype: Any) -> np.ndarray:
        return _error_bound(codes, parts, dtype)

    return Reduction(codes.name, all_reduce, reduce_scatter, all_gather, _messages, error_bound)


def _filled_up(parts: jax.Array) -> jax.Array:
    return jnp.pad(parts, ((0, 0), (0, -parts.shape[1] % BLOCK)))


def _packed(x: jax.Array, codes: Codes) -> jax.Array:
    """[P, values] -> bytes [P, values + 4 a block], each row the codes and then the scales."""
    blocks = x.astype(jnp.float32).reshape(len(x), -1, BLOCK)
    # A block of zeros has a scale, too, and one so small that its scale would not be a normal number has the least.
    scales = jnp.maximum(jnp.abs(blocks).max(axis=-1) / codes.largest, _LEAST_SCALE)
    scaled = jnp.clip(blocks / scales[..., None], -codes.largest, codes.largest)
    as_bytes = [lax.bitcast_convert_type(part, jnp.uint8) for part in (codes.encode(scaled), scales)]
    return jnp.concatenate([part.reshape(len(x), -1) for part in as_bytes], axis=1)


def _values(packed: jax.Array, codes: Codes) -> jax.Array:
    """What `_packed` made -> [P, values] float32."""
    rows, blocks = len(packed), packed.shape[1] // _BLOCK_BYTES
    code = lax.bitcast_convert_type(packed[:, : blocks * BLOCK].reshape(rows, blocks, BLOCK), codes.dtype)
    scales = lax.bitcast_convert_type(packed[:, blocks * BLOCK :].reshape(rows, blocks, 4), jnp.float32)
    return (code.astype(jnp.float32) * scales[..., None]).reshape(rows, -1)


def _messages(operation: Operation, elements: int, itemsize: int, sizes: Mapping[str, int]) -> list[Message]:
    ranks = ranks_of(sizes)
    values = part_size(elements, 1 if operation == "all_gather" else ranks, BLOCK)
    part = values // BLOCK * _BLOCK_BYTES
    halves = {"reduce_scatter": Message("all_to_all", 1, ranks * part), "all_gather": Message("all_gather", 1, part)}
    return list(halves.values()) if operation == "all_reduce" else [halves[operation]]


def _error_bound(codes: Codes, parts: np.ndarray, dtype: Any) -> np.ndarray:
    """Of [P, n] parts: the largest values of their blocks, once for each rank's part and once for the sum.

        e = error / largest of a code (int8: 1/254, fp8: 1/28)
        first half     e * (m_0 + ... + m_{P-1})         m_r: the largest |value| of rank r's block
        second half    e * (that bound + the largest |sum| of the block)

    So it grows with P as the sum does, and a huge value costs only its own block.
    """
    ranks, values = parts.shape
    blocks = -(-values // BLOCK)
    # All ranks cut the same blocks, since a rank's part is a multiple of them.
    largest = np.pad(np.abs(parts), ((0, 0), (0, blocks * BLOCK - values))).reshape(ranks, blocks, BLOCK).max(axis=-1)
    exact = rounding(parts, np.float32, 1)
    # A relative error of float32 in the scale and in the division moves a value to the next code at worst at a tie.
    relative = codes.error / codes.largest * (1 + 8 * float(np.finfo(np.float32).eps))
    floor = codes.error * _LEAST_SCALE + 2 * least(dtype)
    per_block = relative * largest.sum(axis=0) + ranks * floor
    first = np.repeat(per_block, BLOCK)[:values]
    second = relative * (np.abs(largest).sum(axis=0) + per_block) + floor
    total = first + np.repeat(second, BLOCK)[:values] + exact
    unit = float(jnp.finfo(dtype).eps) / 2
    return total * (1 + unit) + unit * np.abs(parts.sum(axis=0)) + least(dtype)
