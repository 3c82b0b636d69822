"""A softmax under way: keys are added a tile at a time, in any order (online softmax, arXiv:1805.02867)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.attention.partial import Partial, Window, masked, products, weighted_values


class Cells(NamedTuple):
    """Queries and keys of [K, B] cells, each one KV head of one lane, as `attend` takes them."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    q_positions: jax.Array
    k_positions: jax.Array


class Sums(NamedTuple):
    """A softmax under way: the sums of values [K, B, T, G, d] and of ones, each weighted by exp(score - top)."""

    out: jax.Array
    top: jax.Array
    total: jax.Array


def opened(part: Partial) -> Sums:
    """The sums that `part` comes of."""
    nothing = jnp.isneginf(part.lse)
    return Sums(jnp.where(nothing[..., None], 0.0, part.out), part.lse, jnp.where(nothing, 0.0, 1.0))


def closed(sums: Sums) -> Partial:
    """The partial result over all keys added so far."""
    safe = jnp.where(sums.total == 0, 1.0, sums.total)
    return Partial(sums.out / safe[..., None], jnp.where(sums.total == 0, -jnp.inf, sums.top + jnp.log(safe)))


def added(
    sums: Sums | None,
    x: Cells,
    window: Window,
    scale: float,
    full: bool = False,
    reduce: Callable[[jax.Array], jax.Array] = lambda products: products,
) -> Sums:
    """`sums` (None: of no keys) with the keys of `x` in them; `full`: every query of `x` sees every key of it.

    `reduce` makes whole products of those [K, B, T * G, S] of which a rank has a part.
    """
    scores, v = reduce(products(x.q, x.k)), x.v
    if not full:
        scores = masked(scores, x.q_positions, x.k_positions, window)
        # An entry without a key may be NaN, and its weight of 0 would not hide it.
        v = jnp.where((x.k_positions >= 0)[None, :, :, None], v, jnp.zeros((), v.dtype))
    # The maximum is scaled, not the scores: XLA:CPU would write scaled scores out for it.
    top = scores.max(axis=-1).reshape(x.q.shape[:-1]) * scale
    top = top if sums is None else jnp.maximum(sums.top, top)
    base = jnp.where(jnp.isneginf(top), 0.0, top)
    weights = jnp.exp(scores * scale - base.reshape(*scores.shape[:-1], 1))
    out = weighted_values(weights.astype(v.dtype), v).reshape(*top.shape, v.shape[-1])
    total = weights.sum(axis=-1).reshape(top.shape)
    if sums is None:
        return Sums(out, top, total)
    kept = jnp.exp(sums.top - base)
    return Sums(sums.out * kept[..., None] + out, top, sums.total * kept + total)
