"""How a sublayer joins the residual stream: enter -> local -> leave.

residual [T, D]                                        residual [T, D]
|  enter: gather the tokens that other ranks hold,     ^  leave: sum the partial results,
|         or take a slice of those that all have       |         or scatter the sum over tokens,
v                                                      |         or gather the slices
the sublayer's own work, on its slice of the width ----+

Where the tokens are split over ranks that do not divide them, the last ranks hold rows of zeros.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.collectives.move import gather_same
from jaxpar.collectives.reduce import all_sum, scatter_sum
from jaxpar.ledger.traffic import Traffic
from jaxpar.plan import Sublayer
from jaxpar.strategies import Step

AllReduce = Callable[[jax.Array, tuple[str, ...]], jax.Array]


def enter(x: jax.Array, sublayer: Sublayer, tokens: int) -> jax.Array:
    """Residual rows -> the rows [T, D] that the sublayer works on, `tokens` in all where any had to be gathered."""
    if sublayer.gather:
        x = gather_same(x, sublayer.gather)[:tokens]
    return own_rows(x, sublayer.deal)


def own_rows(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """This rank's slice of rows [T, ...] that all ranks of `axes` have; zeros fill the last slices up."""
    if not axes:
        return x
    ranks = lax.axis_size(axes)
    rows = -(-x.shape[0] // ranks)
    x = jnp.pad(x, ((0, rows * ranks - x.shape[0]), *[(0, 0)] * (x.ndim - 1)))
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * rows, rows)


def leave(partial: jax.Array, sublayer: Sublayer, all_reduce: AllReduce) -> jax.Array:
    """A rank's partial result [T, D] -> its contribution to the residual stream, summed exactly once.

    Slices that were dealt out come back with the rows that filled up the last.
    """
    if sublayer.scatter:
        padding = -partial.shape[0] % lax.axis_size(sublayer.scatter)
        partial = scatter_sum(jnp.pad(partial, ((0, padding), (0, 0))), sublayer.scatter)
    return gather_same(all_reduce(partial, sublayer.sum), sublayer.deal)


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


def enter_traffic(step: Step, scope: tuple[str, str], sublayer: Sublayer, calls: int) -> list[Traffic]:
    """What `enter` sends for the (sublayer, strategy) of `scope`: all-gathers of a rank's slice of the rows."""
    if not sublayer.gather:
        return []
    message = -(-step.rows // step.ranks(sublayer.gather)) * step.row_bytes
    return [step.sends(scope, "all_gather", sublayer.gather, calls, message)]


def leave_traffic(step: Step, scope: tuple[str, str], sublayer: Sublayer, rows: int, calls: int) -> list[Traffic]:
    """What `leave` sends of a sublayer's `rows`.

    Reduce-scatters of the rows, filled up to a multiple of the ranks; sums of what is left; gathers of its slices.
    """
    found = []
    if sublayer.scatter:
        ranks = step.ranks(sublayer.scatter)
        rows = -(-rows // ranks)
        found.append(step.sends(scope, "reduce_scatter", sublayer.scatter, calls, rows * ranks * step.row_bytes))
    if sublayer.sum:
        found.append(step.sends(scope, "all_reduce", sublayer.sum, calls, rows * step.row_bytes))
    if sublayer.deal:
        found.append(step.sends(scope, "all_gather", sublayer.deal, calls, rows * step.row_bytes))
    return found
