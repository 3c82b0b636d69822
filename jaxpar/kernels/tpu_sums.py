"""A softmax under way inside a TPU kernel: `attention/online.py` on references to a core's memory (VMEM).

Statistics are columns [rows, 1] of float32, as they lie beside the scores [rows, keys] that they belong to.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

LANES = 128
"""Numbers that a vector register holds side by side."""

Ref = Any
"""A reference of Pallas to an array, which has no public type."""


class Sums(NamedTuple):
    """References to the sums of values [rows, d] and of ones [rows, 1], each weighted by exp(score - top [rows, 1])."""

    out: Ref
    top: Ref
    total: Ref


def sums_in_vmem(*rows: int, size: int) -> list[Any]:
    """What `Sums` refer to, as scratch shapes of a kernel."""
    return [pltpu.VMEM((*rows, width), jnp.float32) for width in (size, 1, 1)]


def open_sums(sums: Sums) -> None:
    """No key yet."""
    sums.out[...] = jnp.zeros_like(sums.out)
    sums.top[...] = jnp.full_like(sums.top, -jnp.inf)
    sums.total[...] = jnp.zeros_like(sums.total)


def reopen_sums(sums: Sums, out: jax.Array, lse: jax.Array) -> None:
    """The sums that a partial result comes of: `out` [rows, d], `lse` [rows, 1]."""
    nothing = lse == -jnp.inf
    sums.out[...] = jnp.where(nothing, 0.0, out)
    sums.top[...] = lse
    sums.total[...] = jnp.where(nothing, 0.0, 1.0)


def add_keys(sums: Sums, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None, scale: float) -> None:
    """Add keys [keys, d_k] and values [keys, d_v] for queries [rows, d_k]; those that `mask` [rows, keys] lets see."""
    scores = scale * lax.dot_general(q, k, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf)
    before = sums.top[...]
    top = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
    base = jnp.where(top == -jnp.inf, 0.0, top)
    weights = jnp.exp(scores - base)
    kept = jnp.exp(before - base)
    sums.top[...] = top
    sums.total[...] = sums.total[...] * kept + jnp.sum(weights, axis=1, keepdims=True)
    values = lax.dot_general(weights.astype(v.dtype), v, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    sums.out[...] = sums.out[...] * kept + values


def close_sums(sums: Sums) -> tuple[jax.Array, jax.Array]:
    """The partial result over all keys added: [rows, d], and its LSE [rows, 1]."""
    total = sums.total[...]
    safe = jnp.where(total == 0, 1.0, total)
    return sums.out[...] / safe, jnp.where(total == 0, -jnp.inf, sums.top[...] + jnp.log(safe))


def without_nothing(values: jax.Array, holds_key: jax.Array) -> jax.Array:
    """Values [keys, d] with 0 where `holds_key` [keys, 1] is false: such an entry may be NaN, which no weight hides."""
    return jnp.where(holds_key, values.astype(jnp.float32), 0.0).astype(values.dtype)


def to_column(row: jax.Array) -> jax.Array:
    """[1, n] -> [n, 1]; n a multiple of LANES."""
    return jnp.transpose(jnp.broadcast_to(row, (LANES, row.shape[1])))[:, :1]


def to_row(column: jax.Array) -> jax.Array:
    """[n, 1] -> [1, n]; n a multiple of LANES."""
    return jnp.transpose(jnp.broadcast_to(column, (column.shape[0], LANES)))[:1]
