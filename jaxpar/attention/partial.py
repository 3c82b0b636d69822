"""Attention over some of the keys, and how such partial results merge.

A partial is the output of a softmax over a subset of the keys, with the logarithm of that softmax's denominator
(natural-log LSE). Merging is associative and needs no order (online softmax, arXiv:1805.02867); a partial over no key
has LSE = -inf and weight 0, even where its output is NaN. Statistics and outputs are float32.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.collectives.types import match_varying

_BATCH = ((0, 1), (0, 1))
"""Every KV head and lane is a matrix product of its own."""


NO_WINDOW = 1 << 30
"""A window beyond every position, where a window must be a number: position + window is still an int32."""

Window = int | jax.Array | None
"""Tokens of a sliding window, None for full attention; an int32 scalar where ranks of other stages have another."""


class Partial(NamedTuple):
    """`out` [..., d] and `lse` [...], both float32."""

    out: jax.Array
    lse: jax.Array


def merge_all(parts: Partial) -> Partial:
    """Attention over the union of N disjoint sets of keys: Partials of [N, ..., d] -> Partial of [..., d]."""
    out = weighted(parts.out, weights_among(parts.lse, parts.lse)).sum(axis=0)
    return Partial(out, jax.nn.logsumexp(parts.lse, axis=0))


def weights_among(lse: jax.Array, every: jax.Array) -> jax.Array:
    """The weights of partials of LSE `lse` [M, ...] in the union of those of `every` [N, ...], which has them too."""
    top = every.max(axis=0, keepdims=True)
    top = jnp.where(jnp.isneginf(top), 0.0, top)
    total = jnp.exp(every - top).sum(axis=0, keepdims=True)
    return jnp.exp(lse - top) / jnp.where(total == 0, 1.0, total)


def weighted(out: jax.Array, weights: jax.Array) -> jax.Array:
    """Outputs [..., d] by weights [...]: one of 0 must win over a NaN output, and 0 x NaN is NaN, so it chooses."""
    return jnp.where(weights[..., None] == 0, 0.0, out * weights[..., None])


def no_keys(q: jax.Array, size: int, *keys: jax.Array) -> Partial:
    """The partial result of `q` [..., d] over no key, of values of `size`, typed to merge with those over `keys`."""
    fresh = jnp.zeros((*q.shape[:-1], size)), jnp.full(q.shape[:-1], -jnp.inf)
    return Partial(*(match_varying(x, q, *keys) for x in fresh))


def with_sinks(part: Partial, sinks: jax.Array | None) -> jax.Array:
    """The output of a Partial [..., H, d] over all keys, where each head has one more key of score `sinks` [H].

    That key has no value (gpt_oss): the partial merges with output 0 and LSE `sinks`, and so keeps a weight of
    exp(lse) / (exp(lse) + exp(sink)).
    """
    if sinks is None:
        return part.out
    return weighted(part.out, jax.nn.sigmoid(part.lse - lax.expand_dims(sinks, range(part.lse.ndim - 1))))


def visible(q_positions: jax.Array, k_positions: jax.Array, window: Window) -> jax.Array:
    """Which keys [B, S] a query [B, T] sees -> [B, T, S]: real ones, not later than it, within the window."""
    query, key = q_positions[:, :, None], k_positions[:, None, :]
    seen = (key >= 0) & (key <= query)
    return seen if window is None else seen & (query - key < window)


def products(q: jax.Array, k: jax.Array) -> jax.Array:
    """Float32 products [K, B, T * G, S] of queries [K, B, T, G, d] and keys [K, B, S, d]."""
    heads, lanes, tokens, group, size = q.shape
    # Rows are (token, group member): one product per KV head and lane, on contiguous keys.
    rows = q.reshape(heads, lanes, tokens * group, size)
    return lax.dot_general(rows, k, (((3,), (3,)), _BATCH), preferred_element_type=jnp.float32)


def masked(products: jax.Array, q_positions: jax.Array, k_positions: jax.Array, window: Window) -> jax.Array:
    """What `products` gives, -inf where the query does not see the key."""
    group = products.shape[2] // q_positions.shape[1]
    mask = jnp.repeat(visible(q_positions, k_positions, window), group, axis=1)[None]
    return jnp.where(mask, products, -jnp.inf)


def weighted_values(weights: jax.Array, v: jax.Array) -> jax.Array:
    """Float32 sums [K, B, T * G, d] of values [K, B, S, d] by weights [K, B, T * G, S]."""
    return lax.dot_general(weights, v, (((3,), (2,)), _BATCH), preferred_element_type=jnp.float32)
