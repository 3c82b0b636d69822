"""The grouped matrix product on GPUs: tiles of one expert each, all at once (MegaBlocks, arXiv:2211.15841).

    rows      0 0 0 0 0 2 3 3 - -
    tiles     [ 4   ]                 expert 0, rows 0 1 2 3
                  [ 4   ]             expert 0, of which it owns one row
                    [ 4   ]           expert 2, likewise
                      [ 4   ]         expert 3, two of them; a tile never begins beyond the rows that leave it whole

Each expert's rows begin a tile, as in `moe/tiles.py`. A tile writes the rows that are its expert's alone, so that tiles
may overlap. There are as many as any routing needs; those that are none end at once.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxpar.kernels.triton_call import LEAST, Ref, dot, fitting_block, largest_block, triton_call
from jaxpar.moe.tiles import owned_tiles

MOST = 128
"""Rows of a tile that registers hold beside as many columns."""

WIDTH, DEPTH = 128, 64
"""Columns of a tile, and how many numbers are summed at once, at most."""


def fits(rows: jax.Array, weights: jax.Array, contracted: int) -> bool:
    """Whether the kernel takes these: whole blocks of 16, and places in the weights that an int32 can count."""
    return not any(size % LEAST for size in weights.shape[1:]) and weights.size < 1 << 31


# Traced once for all layers.
@partial(jax.jit, static_argnames=("contracted", "interpret"))
def product(
    rows: jax.Array, weights: jax.Array, counts: jax.Array, contracted: int, interpret: bool = False
) -> jax.Array:
    """As `kernels.grouped.product`, but rows from sum(counts) on hold anything. `interpret`: on any backend."""
    count, experts = len(rows), len(weights)
    summed, width = weights.shape[contracted], weights.shape[3 - contracted]
    tile = fitting_block(-(-count // experts), MOST)
    rows = jnp.pad(rows, ((0, max(tile - count, 0)), (0, 0)))
    columns, depth = largest_block(width, WIDTH), largest_block(summed, DEPTH)
    tiles = owned_tiles(counts, count, tile)
    call = triton_call(
        partial(_kernel, tile, columns, depth, contracted),
        grid=(len(tiles.expert), width // columns),
        shapes=[(len(rows), width)],
        like=rows,
        flops=2 * count * summed * width,
        bytes_accessed=rows.size * rows.dtype.itemsize + weights.size * weights.dtype.itemsize + 4 * count * width,
        warps=8 if tile > 64 else 4,
        interpret=interpret,
    )
    (out,) = call(*tiles, rows, weights)
    return out[:count]


def _kernel(
    tile: int, columns: int, depth: int, contracted: int,
    expert: Ref, first: Ref, end: Ref, rows: Ref, weights: Ref, out: Ref,
) -> None:  # fmt: skip
    index, column = pl.program_id(0), pl.program_id(1) * columns
    begin, stop = first[index], end[index]

    @pl.when(begin < stop)
    def _() -> None:
        own = expert[index]
        start = jnp.minimum(begin, rows.shape[0] - tile)

        def add(step: jax.Array, sums: jax.Array) -> jax.Array:
            at = pl.ds(step * depth, depth)
            left = rows[pl.ds(start, tile), at]
            across = pl.ds(column, columns)
            right = weights[own, across, at].T if contracted == 2 else weights[own, at, across]
            return sums + dot(left, right)

        steps = weights.shape[contracted] // depth
        sums = lax.fori_loop(0, steps, add, jnp.zeros((tile, columns), jnp.float32))
        at = start + jnp.arange(tile)
        place = out.at[pl.ds(start, tile), pl.ds(column, columns)]
        triton.store(place, sums, mask=((at >= begin) & (at < stop))[:, None])
