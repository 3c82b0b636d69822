"""The elementary collectives over a tuple of axes, each refused at trace time where it would be wrong.

A sum over ranks is right only where the operand differs between them as a partial result. JAX accepts a second psum
of a finished sum (P times too large) and a gather of copies; here both raise, because the operand's type says that it
does not vary over the axis.
"""

from __future__ import annotations

import jax
from jax import lax

from jaxpar.collectives.types import varying_axes
from jaxpar.errors import PlanError


def _require_varying(operation: str, x: jax.Array, axes: tuple[str, ...]) -> None:
    same = [axis for axis in axes if axis not in varying_axes(x)]
    if same:
        raise PlanError(
            f"{operation} over {', '.join(axes)} of an array that is the same on every rank of {', '.join(same)}: "
            f"it would be counted more than once; reduce each partial sum once"
        )


def rank_index(axes: tuple[str, ...]) -> jax.Array | int:
    """This rank's place among those of `axes`; over no axes there is one, and nothing varies."""
    return lax.axis_index(axes) if axes else 0


def all_sum(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Sum of every rank's `x`, on every rank. Same shape; raises PlanError unless `x` varies over all `axes`."""
    if not axes:
        return x
    _require_varying("all_sum", x, axes)
    return lax.psum(x, axes)


def all_max(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Elementwise maximum of every rank's `x`, on every rank."""
    if not axes:
        return x
    _require_varying("all_max", x, axes)
    return lax.pmax(x, axes)


def all_min(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Elementwise minimum of every rank's `x`, on every rank."""
    if not axes:
        return x
    _require_varying("all_min", x, axes)
    return lax.pmin(x, axes)


def scatter_sum(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Sum of every rank's `x` [T, ...]; rank r of P keeps the r-th [T/P, ...] of it (reduce-scatter)."""
    if not axes:
        return x
    _require_varying("scatter_sum", x, axes)
    return lax.psum_scatter(x, axes, scatter_dimension=0, tiled=True)


def gather_tokens(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Every rank's `x` [T, ...] side by side, [P*T, ...], on every rank."""
    if not axes:
        return x
    _require_varying("gather_tokens", x, axes)
    return lax.all_gather(x, axes, axis=0, tiled=True)
