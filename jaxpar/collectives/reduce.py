"""The elementary collectives over a tuple of axes, each refused at trace time where it would be wrong.

A sum over ranks is right only where the operand differs between them as a partial result. JAX accepts a second psum
of a finished sum (P times too large) and a gather of copies; here both raise, because the operand's type says that it
does not vary over the axis.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.collectives.move import Groups, all_gather
from jaxpar.collectives.types import require_varying


def rank_index(axes: tuple[str, ...]) -> jax.Array | int:
    """This rank's place among those of `axes`; over no axes there is one, and nothing varies."""
    return lax.axis_index(axes) if axes else 0


def all_sum(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Sum of every rank's `x`, on every rank. Same shape; raises PlanError unless `x` varies over all `axes`."""
    if not axes:
        return x
    require_varying("all_sum", x, axes)
    return lax.psum(x, axes)


def all_max(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Elementwise maximum of every rank's `x`, on every rank."""
    if not axes:
        return x
    require_varying("all_max", x, axes)
    return lax.pmax(x, axes)


def all_min(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Elementwise minimum of every rank's `x`, on every rank."""
    if not axes:
        return x
    require_varying("all_min", x, axes)
    return lax.pmin(x, axes)


def scatter_sum(x: jax.Array, axes: tuple[str, ...], dimension: int = 0, groups: Groups = None) -> jax.Array:
    """Sum of every rank's `x`; rank r of P keeps the r-th of P parts along `dimension` (reduce-scatter).

    `groups` restricts it to subgroups of the ranks of a single axis, as in `move`.
    """
    if not axes:
        return x
    require_varying("scatter_sum", x, axes)
    return lax.psum_scatter(x, axes, scatter_dimension=dimension, axis_index_groups=groups, tiled=True)


def sum_in_groups(x: jax.Array, axes: tuple[str, ...], groups: Sequence[Sequence[int]], dimension: int) -> jax.Array:
    """Sum of `x` over the ranks of each group, on all of them; groups are equally many ranks of a single axis.

    A reduce-scatter along `dimension`, filled up with zeros to a multiple of the group, and an all-gather: JAX has no
    psum over groups under check_vma. The result is of a varying type, as groups differ.
    """
    size = x.shape[dimension]
    if missing := -size % len(groups[0]):
        x = jnp.pad(x, [(0, missing if i == dimension else 0) for i in range(x.ndim)])
    whole = all_gather(scatter_sum(x, axes, dimension, groups), axes, dimension, groups)
    return lax.slice_in_dim(whole, 0, size, axis=dimension)
