"""The one choice by backend: a function as XLA compiles it anywhere, and what has been written for one kind of device.

    by_backend(q, k, v, tpu=kernel, default=tiles)

A program on devices holds the one for their platform. One on an abstract mesh, which the ledger counts, holds all of
them until it is compiled for a platform.

An implementation gives what `default` gives, up to rounding. One that cannot take the shapes at hand is left out by the
caller (None), who knows them; `fits` beside a kernel says which it takes. A kernel says what it costs where it is
called (`pl.CostEstimate`): XLA and the ledger cannot look into it, and both count that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax import lax

from jaxpar.collectives.types import match_varying

T = TypeVar("T")


def by_backend(
    *operands: Any,
    default: Callable[..., T],
    tpu: Callable[..., T] | None = None,
    gpu: Callable[..., T] | None = None,
) -> T:
    """What the implementation for the backend that the program is for makes of `operands`.

    Args:
        operands: pytrees of arrays.
        default: for every backend that has no other.
        tpu: for TPUs; None: `default`.
        gpu: for GPUs, of whichever maker; None: `default`.

    Returns:
        Arrays typed as varying over every mesh axis over which an operand does.
    """
    leaves = jax.tree.leaves(operands)

    def typed(run: Callable[..., T]) -> Callable[..., T]:
        def of(*operands: Any) -> T:
            alike: T = jax.tree.map(lambda x: match_varying(x, *leaves), run(*operands))
            return alike

        return of

    platform = platform_of_mesh()
    if platform is not None:
        return typed({"tpu": tpu, "gpu": gpu}.get(platform) or default)(*operands)
    own = {name: typed(run) for name, run in (("tpu", tpu), ("cuda", gpu), ("rocm", gpu)) if run is not None}
    if not own:
        return typed(default)(*operands)
    chosen: T = lax.platform_dependent(*operands, **own, default=typed(default))
    return chosen


def platform_of_mesh() -> str | None:
    """That of the devices that a program is traced for: cpu, tpu or gpu; None on an abstract mesh and without one."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return None if device is None else str(device.platform)
