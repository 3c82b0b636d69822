"""What the type of an array says about ranks: over which mesh axes its values may differ."""

from __future__ import annotations

from typing import Any

import jax


def varying_axes(x: Any) -> frozenset[str]:
    """The manual mesh axes over which `x`, an array, tracer or abstract value, may differ between ranks."""
    kind: Any = x if isinstance(x, jax.core.AbstractValue) else jax.typeof(x)
    return frozenset(kind.manual_axis_type.varying)
