"""The product with a slice of a weight on GPUs: read where it lies, its start is data.

w        [O, I]     a slice of its rows              a slice of its columns
blocks              of its columns, each sums I      of all O, each sums the slice
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxpar.collectives.types import match_varying
from jaxpar.fixed import product_rows
from jaxpar.kernels.triton_call import LEAST, Ref, dot, fitting_block, largest_block, triton_call

ROWS, DEPTH = 64, 128
"""Rows of a block, and how many numbers are summed at once, at most."""

MOST_ROWS = 256
"""Rows beyond which a product takes longer than its weight is read, and a library's is better than no copy."""

_WIDE, _NARROW, _BLOCKS = 32, 16, 64
"""Columns of a block, at most, and those where 32 would make fewer than 64 blocks: decode has few rows, and takes as
long as the weight is read, by as many of a GPU's hundred and more multiprocessors as have a block."""


def fits(x: jax.Array, w: jax.Array, count: int, axis: int) -> bool:
    """Whether the kernel takes these: few rows, whole blocks of 16, and places in the weight that an int32 counts."""
    whole = not any(size % LEAST for size in (count, w.shape[1 - axis]))
    return whole and len(x) <= MOST_ROWS and w.size < 1 << 31


@partial(jax.jit, static_argnames=("count", "axis", "unit", "interpret"))
def product(
    x: jax.Array, w: jax.Array, start: jax.Array, count: int, axis: int, unit: int, interpret: bool = False
) -> jax.Array:
    """As `kernels.dense.matmul_slice`. `interpret`: on any backend."""
    rows, summed = x.shape
    width = count if axis == 0 else len(w)
    tile = fitting_block(rows, ROWS)
    padded = -(-rows // tile) * tile
    columns = largest_block(width, _WIDE if width >= _WIDE * _BLOCKS else _NARROW)
    depth = largest_block(summed, DEPTH)
    call = triton_call(
        partial(_kernel, tile, columns, depth, axis, unit),
        grid=(padded // tile, width // columns),
        shapes=[(padded, width)],
        like=match_varying(x, w, start),
        # As many as other backends compute, which is what the ledger counts.
        flops=2 * product_rows(rows, x.dtype.itemsize) * summed * width,
        bytes_accessed=rows * summed * x.dtype.itemsize + summed * width * w.dtype.itemsize + 4 * rows * width,
        warps=4,
        interpret=interpret,
    )
    (out,) = call(jnp.reshape(start // unit, 1).astype(jnp.int32), jnp.pad(x, ((0, padded - rows), (0, 0))), w)
    return out[:rows]


def _kernel(tile: int, columns: int, depth: int, axis: int, unit: int, start: Ref, x: Ref, w: Ref, out: Ref) -> None:
    row, column, first = pl.program_id(0) * tile, pl.program_id(1) * columns, start[0] * unit

    def add(step: jax.Array, sums: jax.Array) -> jax.Array:
        at = step * depth
        left = x[pl.ds(row, tile), pl.ds(at, depth)]
        across, along = (first + column, at) if axis == 0 else (column, first + at)
        return sums + dot(left, w[pl.ds(across, columns), pl.ds(along, depth)].T)

    sums = lax.fori_loop(0, x.shape[1] // depth, add, jnp.zeros((tile, columns), jnp.float32))
    out[pl.ds(row, tile), pl.ds(column, columns)] = sums
