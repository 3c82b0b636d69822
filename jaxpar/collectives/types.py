"""What the type of an array says about ranks: over which mesh axes its values may differ."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.errors import PlanError


def varying_axes(x: Any) -> frozenset[str]:
    """The manual mesh axes over which `x`, an array, tracer or abstract value, may differ between ranks."""
    kind: Any = x if isinstance(x, jax.core.AbstractValue) else jax.typeof(x)
    return frozenset(kind.manual_axis_type.varying)


def to_varying(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """The same values, of a type that says that they may differ between ranks of `axes`; nothing is sent."""
    same = tuple(axis for axis in axes if axis not in varying_axes(x))
    return lax.pcast(x, same, to="varying") if same else x


def bits_of(x: jax.Array) -> jax.Array:
    """The bits of floats as unsigned integers of the same size; integers as they are."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def match_varying(x: jax.Array, *others: jax.Array) -> jax.Array:
    """`x` typed as varying over every axis over which one of `others` does: how a fresh accumulator joins a loop."""
    return to_varying(x, sorted(frozenset[str]().union(*map(varying_axes, others))))


def require_varying(operation: str, x: jax.Array, axes: tuple[str, ...]) -> None:
    """Raise PlanError if `x` is the same on all ranks of one of `axes`: nothing is to be summed or gathered there."""
    same = [axis for axis in axes if axis not in varying_axes(x)]
    if same:
        raise PlanError(
            f"{operation} over {', '.join(axes)} of an array that is the same on every rank of {', '.join(same)}: "
            f"it would be counted more than once; reduce each partial sum once"
        )
