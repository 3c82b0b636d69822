"""Work on rows in tiles of one fixed shape, so that what a row gives does not depend on how many there are.

A backend chooses how it multiplies by the shape: a matrix by one row is summed in another order than by eight. Here
there is one shape, as often as it takes, and rows of zeros fill up the last (batch-invariant kernels, "Defeating
Nondeterminism in LLM Inference", Thinking Machines 2025):

    rows    | a b c d e f g h | i j k - - - - - |
                  tile 0            tile 1          each the same product [8, I] x [O, I]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

T = TypeVar("T")

ROWS = 8
"""Rows of a tile: tokens in all that passes the weights of a layer."""


def in_tiles(of_tile: Callable[..., T], *arrays: jax.Array, rows: int = ROWS) -> T:
    """What `of_tile` makes of `arrays` [N, ...], row by row of them, `rows` rows at a time -> arrays [N, ...]."""
    count = arrays[0].shape[0]
    tiles = -(-count // rows)

    def cut(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, tiles * rows - count), *[(0, 0)] * (x.ndim - 1)))
        return x.reshape(tiles, rows, *x.shape[1:])

    def alone(tile: tuple[jax.Array, ...]) -> T:
        # A loop of one round is unrolled: without barriers its work would be fused with what stands around it.
        done: T = lax.optimization_barrier(of_tile(*lax.optimization_barrier(tile)))
        return done

    done = lax.map(alone, tuple(cut(x) for x in arrays))
    whole: T = jax.tree.map(lambda y: y.reshape(tiles * rows, *y.shape[2:])[:count], done)
    return whole


def by_row(of_rows: Callable[..., T], *arrays: jax.Array, fixed: bool) -> T:
    """What `of_rows` makes of `arrays` [N, ...], row by row of them: at once, or where shapes are fixed `in_tiles`."""
    return in_tiles(of_rows, *arrays) if fixed else of_rows(*arrays)


def whole_tiles(count: int, rows: int = ROWS) -> int:
    """Rows of the tiles that hold `count` rows."""
    return -(-count // rows) * rows


def product_rows(rows: int, itemsize: int, fixed: bool = False) -> int:
    """Rows of the products that `kernels.dense.matmul` computes of so many.

    A single row of 16-bit numbers goes in twice: XLA:CPU has no fast product for it and takes ten times as long as for
    two, and accelerators fill up their tiles in any case.
    """
    if fixed:
        return whole_tiles(rows)
    return 2 if rows == 1 and itemsize == 2 else rows
