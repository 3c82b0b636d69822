"""Over which mesh axes a kernel's result varies, which Pallas cannot know: said here, so that `check_vma` stays on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxpar.collectives.types import match_varying


def typed_like(x: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """What one of our kernels gives: an array of `shape` that varies over ranks as `x` does."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(x).manual_axis_type)


def of_jax(kernel: Callable[..., jax.Array], *operands: jax.Array) -> jax.Array:
    """What one of JAX's kernels makes of `operands`: it varies over every axis over which one of them does."""
    if jax.sharding.get_abstract_mesh().empty:
        return kernel(*operands)
    specs = tuple(P() for _ in operands)
    # JAX's kernels do not say over which axes their results vary: around them nothing is checked, and then it is said.
    unchecked = jax.shard_map(kernel, in_specs=specs, out_specs=P(), axis_names=set(), check_vma=False)
    return match_varying(unchecked(*operands), *operands)
