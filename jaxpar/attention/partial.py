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

KEY_TILE = 1024
"""Keys of one tile: the scores of a step never take more than queries x KEY_TILE."""


def tiled(keys: int) -> int:
    """Keys that `attend` works on for a bag of `keys`: whole tiles, where there is more than one."""
    return keys if keys <= KEY_TILE else -(-keys // KEY_TILE) * KEY_TILE


class Partial(NamedTuple):
    """`out` [..., d] and `lse` [...], both float32."""

    out: jax.Array
    lse: jax.Array


def merge(a: Partial, b: Partial) -> Partial:
    """Attention over the union of two disjoint sets of keys."""
    top = jnp.maximum(a.lse, b.lse)
    top = jnp.where(jnp.isneginf(top), 0.0, top)
    weights = jnp.exp(a.lse - top), jnp.exp(b.lse - top)
    total = weights[0] + weights[1]
    safe = jnp.where(total == 0, 1.0, total)
    # A weight of 0 must win over a NaN output, and 0 x NaN is NaN: choose instead of multiplying.
    parts = [
        jnp.where(weight[..., None] == 0, 0.0, part.out * (weight / safe)[..., None])
        for weight, part in zip(weights, (a, b), strict=True)
    ]
    return Partial(parts[0] + parts[1], jnp.where(total == 0, -jnp.inf, top + jnp.log(safe)))


def visible(q_positions: jax.Array, k_positions: jax.Array, window: int | None) -> jax.Array:
    """Which keys [B, S] a query [B, T] sees -> [B, T, S]: real ones, not later than it, within the window."""
    query, key = q_positions[:, :, None], k_positions[:, None, :]
    seen = (key >= 0) & (key <= query)
    return seen if window is None else seen & (query - key < window)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_positions: jax.Array,
    k_positions: jax.Array,
    window: int | None,
    scale: float,
) -> Partial:
    """Attention of grouped queries over a bag of keys, in tiles of KEY_TILE keys.

    Args:
        q: [K, B, T, G, d], the G query heads that share each of K KV heads.
        k, v: [K, B, S, d], in any order; entries whose position is -1 may hold anything, NaN too.
        q_positions: [B, T] global positions, -1 for padding.
        k_positions: [B, S] global positions, -1 for entries that hold no key.
        window: tokens of the sliding window, or None.
        scale: on the scores.

    Returns:
        Partial of [K, B, T, G, d].
    """
    size = k.shape[2]
    if size <= KEY_TILE:
        return _attend_tile(q, k, v, q_positions, k_positions, window, scale)
    pad, tiles = tiled(size) - size, tiled(size) // KEY_TILE
    k, v = (lax.pad(x, jnp.zeros((), x.dtype), ((0, 0, 0), (0, 0, 0), (0, pad, 0), (0, 0, 0))) for x in (k, v))
    k_positions = lax.pad(k_positions, jnp.int32(-1), ((0, 0, 0), (0, pad, 0)))

    def tile(start: jax.Array | int) -> Partial:
        part = [lax.dynamic_slice_in_dim(x, start, KEY_TILE, axis=2) for x in (k, v)]
        part_positions = lax.dynamic_slice_in_dim(k_positions, start, KEY_TILE, axis=1)
        return _attend_tile(q, *part, q_positions, part_positions, window, scale)

    def body(done: Partial, start: jax.Array) -> tuple[Partial, None]:
        return merge(done, tile(start)), None

    return lax.scan(body, tile(0), jnp.arange(1, tiles, dtype=jnp.int32) * KEY_TILE)[0]


def _attend_tile(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_positions: jax.Array,
    k_positions: jax.Array,
    window: int | None,
    scale: float,
) -> Partial:
    heads, lanes, tokens, group, size = q.shape
    # Rows are (token, group member): one product per KV head and lane, on contiguous keys.
    rows = q.reshape(heads, lanes, tokens * group, size)
    batch = ((0, 1), (0, 1))
    scores = lax.dot_general(rows, k, (((3,), (3,)), batch), preferred_element_type=jnp.float32) * scale
    mask = visible(q_positions, k_positions, window)
    mask = jnp.repeat(mask, group, axis=1)[None]
    scores = jnp.where(mask, scores, -jnp.inf)
    top = scores.max(axis=-1)
    top = jnp.where(jnp.isneginf(top), 0.0, top)
    weights = jnp.exp(scores - top[..., None])
    total = weights.sum(axis=-1)
    safe = jnp.where(total == 0, 1.0, total)
    # An entry without a key may be NaN, and its weight of 0 would not hide it.
    v = jnp.where((k_positions >= 0)[None, :, :, None], v, jnp.zeros((), v.dtype))
    out = lax.dot_general(weights.astype(v.dtype), v, (((3,), (2,)), batch), preferred_element_type=jnp.float32)
    lse = jnp.where(total == 0, -jnp.inf, top + jnp.log(safe))
    shape = (heads, lanes, tokens, group)
    return Partial((out / safe[..., None]).reshape(*shape, size), lse.reshape(shape))
