"""How a sublayer joins the residual stream: enter -> local -> leave.

residual [T, D]                                        residual [T, D]
|  enter: gather the tokens that other ranks hold,     ^  leave: sum the partial results,
|         or take a slice of those that all have       |         or scatter the sum over tokens,
v                                                      |         or gather the slices
the sublayer's own work, on its slice of the width ----+

Where the tokens are split over ranks that do not divide them, the last ranks hold rows of zeros.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.collectives.move import gather_same
from jaxpar.collectives.reduce import all_sum
from jaxpar.collectives.reduction import NATIVE, Reduction
from jaxpar.plan import Sublayer


def enter(x: jax.Array, sublayer: Sublayer, tokens: int, reduction: Reduction = NATIVE) -> jax.Array:
    """Residual rows -> the rows [T, D] that the sublayer works on, `tokens` in all where any had to be gathered."""
    if sublayer.gather:
        x = reduction.all_gather(x, sublayer.gather)[:tokens]
    return own_rows(x, sublayer.deal)


def own_rows(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """This rank's slice of rows [T, ...] that all ranks of `axes` have; zeros fill the last slices up."""
    if not axes:
        return x
    ranks = lax.axis_size(axes)
    rows = -(-x.shape[0] // ranks)
    x = jnp.pad(x, ((0, rows * ranks - x.shape[0]), *[(0, 0)] * (x.ndim - 1)))
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * rows, rows)


def leave(partial: jax.Array, sublayer: Sublayer, reduction: Reduction = NATIVE) -> jax.Array:
    """A rank's partial result [T, D] -> its contribution to the residual stream, summed exactly once.

    Slices that were dealt out come back with the rows that filled up the last.
    """
    if sublayer.scatter:
        padding = -partial.shape[0] % lax.axis_size(sublayer.scatter)
        partial = reduction.reduce_scatter(jnp.pad(partial, ((0, padding), (0, 0))), sublayer.scatter)
    return gather_same(reduction.all_reduce(partial, sublayer.sum), sublayer.deal)


def pick_rows(x: jax.Array, rows: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Rows [N] of the matrix of which each rank of `axes` holds a slice `x` [R, D], in order -> [N, D] on every rank.

    The rank that holds a row gives it and the others zeros, so that the sum is exact; over no axes nothing is sent.
    """
    if not axes:
        return x[rows]
    local = rows - lax.axis_index(axes) * x.shape[0]
    mine = (local >= 0) & (local < x.shape[0])
    held = x[jnp.clip(local, 0, x.shape[0] - 1)]
    return all_sum(jnp.where(mine[:, None], held, jnp.zeros((), x.dtype)), axes)
