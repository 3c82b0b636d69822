"""What the type of an array says about ranks: over which mesh axes its values may differ."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax


def varying_axes(x: Any) -> frozenset[str]:
    """The manual mesh axes over which `x`, an array, tracer or abstract value, may differ between ranks."""
    kind: Any = x if isinstance(x, jax.core.AbstractValue) else jax.typeof(x)
    return frozenset(kind.manual_axis_type.varying)


def match_varying(x: jax.Array, *others: jax.Array) -> jax.Array:
    """`x` typed as varying over every axis over which one of `others` does: how a fresh accumulator joins a loop."""
    axes = frozenset[str]().union(*(varying_axes(other) for other in others)) - varying_axes(x)
    return lax.pcast(x, tuple(sorted(axes)), to="varying") if axes else x
