"""Attention over some of the keys, and how such partial results merge.

A partial is the output of a softmax over a subset of the keys, with the logarithm of that softmax's denominator
(natural-log LSE). Merging is associative and needs no order (online softmax, arXiv:1805.02867); a partial over no key
has LSE = -inf and weight 0, even where its output is NaN. Statistics and outputs are float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.collectives.types import match_varying

QUERY_TILE, KEY_TILE = 128, 128
"""Queries and keys of one tile in prefill: scores stay in a core's cache, and a tile that no query sees is skipped."""

DECODE_KEY_TILE = 1024
"""Keys of one tile when each request has a single query."""

_BATCH = ((0, 1), (0, 1))
"""Every KV head and lane is a matrix product of its own."""


def tile_sizes(queries: int, keys: int) -> tuple[int, int]:
    """The tiles (queries, keys) that `attend` cuts its work into; a smaller problem is one tile of its own size."""
    return min(queries, QUERY_TILE), min(keys, KEY_TILE if queries > 1 else DECODE_KEY_TILE)


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


def merge_all(parts: Partial) -> Partial:
    """Attention over the union of N disjoint sets of keys: Partials of [N, ..., d] -> Partial of [..., d]."""
    top = parts.lse.max(axis=0)
    top = jnp.where(jnp.isneginf(top), 0.0, top)
    weights = jnp.exp(parts.lse - top[None])
    total = weights.sum(axis=0)
    safe = jnp.where(total == 0, 1.0, total)
    weighted = jnp.where(weights[..., None] == 0, 0.0, parts.out * (weights / safe[None])[..., None])
    return Partial(weighted.sum(axis=0), jnp.where(total == 0, -jnp.inf, top + jnp.log(safe)))


def no_keys(q: jax.Array, *keys: jax.Array) -> Partial:
    """The partial result of `q` [..., d] over no key, typed to merge with those over `keys`."""
    fresh = jnp.zeros(q.shape), jnp.full(q.shape[:-1], -jnp.inf)
    return Partial(*(match_varying(x, q, *keys) for x in fresh))


def attend_flops(lanes: int, heads: int, queries: int, keys: int, size: int) -> int:
    """FLOPs of `attend` for `queries` and `keys` of each lane and `heads` query heads, every tile counted."""
    q_tile, k_tile = tile_sizes(queries, keys)
    tiles = -(-queries // q_tile) * -(-keys // k_tile)
    return 4 * lanes * heads * tiles * q_tile * k_tile * size


def visible(q_positions: jax.Array, k_positions: jax.Array, window: int | None) -> jax.Array:
    """Which keys [B, S] a query [B, T] sees -> [B, T, S]: real ones, not later than it, within the window."""
    query, key = q_positions[:, :, None], k_positions[:, None, :]
    seen = (key >= 0) & (key <= query)
    return seen if window is None else seen & (query - key < window)


def masked_scores(
    q: jax.Array, k: jax.Array, q_positions: jax.Array, k_positions: jax.Array, window: int | None, scale: float
) -> jax.Array:
    """Float32 scores [K, B, T * G, S] of what `attend` takes; -inf where the query does not see the key."""
    heads, lanes, tokens, group, size = q.shape
    # Rows are (token, group member): one product per KV head and lane, on contiguous keys.
    rows = q.reshape(heads, lanes, tokens * group, size)
    scores = lax.dot_general(rows, k, (((3,), (3,)), _BATCH), preferred_element_type=jnp.float32) * scale
    mask = jnp.repeat(visible(q_positions, k_positions, window), group, axis=1)[None]
    return jnp.where(mask, scores, -jnp.inf)


def weighted_values(weights: jax.Array, v: jax.Array) -> jax.Array:
    """Float32 sums [K, B, T * G, d] of values [K, B, S, d] by weights [K, B, T * G, S]."""
    return lax.dot_general(weights, v, (((3,), (2,)), _BATCH), preferred_element_type=jnp.float32)


def seen_tiles(q_positions: Any, k_positions: Any, q_tile: int, k_tile: int, window: int | None) -> Any:
    """Which tiles [queries / q_tile, keys / k_tile] are computed; numpy or JAX arrays, padded to whole tiles.

    A tile is left out if its earliest key is later than its last query, or its last key out of the window of its first
    query, for every lane: of a causal mask these are exactly the tiles in which no query sees a key.
    """
    xp = q_positions.__array_namespace__()
    never = xp.iinfo(xp.int32).max
    q, k = (x.reshape(x.shape[0], -1, tile) for x, tile in ((q_positions, q_tile), (k_positions, k_tile)))
    first_key = xp.where(k >= 0, k, never).min(axis=2)
    seen = first_key[:, None, :] <= q.max(axis=2)[:, :, None]
    if window is not None:
        first_query = xp.where(q >= 0, q, never).min(axis=2)
        # Not `first_query - last_key < window`: the first query of a tile of padding is as large as an int can be.
        seen = seen & (first_query[:, :, None] < (k.max(axis=2) + window)[:, None, :])
    return seen.any(axis=0)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_positions: jax.Array,
    k_positions: jax.Array,
    window: int | None,
    scale: float,
) -> Partial:
    """Attention of grouped queries over a bag of keys, tile by tile (FlashAttention, arXiv:2205.14135).

             keys ->  | 128 | 128 | 128 | 128 |
    queries  128      |  x  |     |     |     |      a tile is computed only where some query sees some key of it;
             128      |  x  |  x  |     |     |      partials of a row of tiles merge from left to right
             128      |  x  |  x  |  x  |     |

    Args:
        q: [K, B, T, G, d], the G query heads that share each of K KV heads.
        k: [K, B, S, d], in any order; entries whose position is -1 may hold anything, NaN too.
        v: the same for values.
        q_positions: [B, T] global positions, -1 for padding.
        k_positions: [B, S] global positions, -1 for entries that hold no key.
        window: tokens of the sliding window, or None.
        scale: on the scores.

    Returns:
        Partial of [K, B, T, G, d].
    """
    queries, keys = q.shape[2], k.shape[2]
    q_tile, k_tile = tile_sizes(queries, keys)
    if (q_tile, k_tile) == (queries, keys):
        return _attend_tile(q, k, v, q_positions, k_positions, window, scale)
    q, q_positions = _pad(q, 2, q_tile, 0), _pad(q_positions, 1, q_tile, -1)
    k, v, k_positions = _pad(k, 2, k_tile, 0), _pad(v, 2, k_tile, 0), _pad(k_positions, 1, k_tile, -1)
    nothing = no_keys(q[:, :, :q_tile], k, v)
    seen = seen_tiles(q_positions, k_positions, q_tile, k_tile, window)

    def row(index: jax.Array, done: Partial) -> Partial:
        q_start = index * q_tile
        q_part = lax.dynamic_slice_in_dim(q, q_start, q_tile, axis=2)
        q_at = lax.dynamic_slice_in_dim(q_positions, q_start, q_tile, axis=1)

        def tile(done: Partial, column: jax.Array) -> tuple[Partial, None]:
            k_start = column * k_tile
            k_part, v_part = (lax.dynamic_slice_in_dim(x, k_start, k_tile, axis=2) for x in (k, v))
            k_at = lax.dynamic_slice_in_dim(k_positions, k_start, k_tile, axis=1)

            def compute(done: Partial) -> Partial:
                return merge(done, _attend_tile(q_part, k_part, v_part, q_at, k_at, window, scale))

            return lax.cond(seen[index, column], compute, lambda done: done, done), None

        part = lax.scan(tile, nothing, jnp.arange(k.shape[2] // k_tile))[0]
        return Partial(
            *(lax.dynamic_update_slice_in_dim(x, y, q_start, axis=2) for x, y in zip(done, part, strict=True))
        )

    # The output starts as the queries, every one of which is overwritten: fresh zeros would depend on nothing, and XLA
    # would make those of all layers before the first of them runs.
    start = match_varying(q.astype(jnp.float32), k, v)
    out, lse = lax.fori_loop(0, q.shape[2] // q_tile, row, Partial(start, start[..., 0]))
    return Partial(out[:, :, :queries], lse[:, :, :queries])


def _pad(x: jax.Array, axis: int, tile: int, value: int) -> jax.Array:
    """Pad `axis` to whole tiles."""
    widths = [(0, -x.shape[axis] % tile if dim == axis else 0, 0) for dim in range(x.ndim)]
    return lax.pad(x, jnp.asarray(value, x.dtype), widths)


def _attend_tile(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_positions: jax.Array,
    k_positions: jax.Array,
    window: int | None,
    scale: float,
) -> Partial:
    scores = masked_scores(q, k, q_positions, k_positions, window, scale)
    top = scores.max(axis=-1)
    top = jnp.where(jnp.isneginf(top), 0.0, top)
    weights = jnp.exp(scores - top[..., None])
    total = weights.sum(axis=-1)
    safe = jnp.where(total == 0, 1.0, total)
    # An entry without a key may be NaN, and its weight of 0 would not hide it.
    v = jnp.where((k_positions >= 0)[None, :, :, None], v, jnp.zeros((), v.dtype))
    out = weighted_values(weights.astype(v.dtype), v)
    lse = jnp.where(total == 0, -jnp.inf, top + jnp.log(safe))
    return Partial((out / safe[..., None]).reshape(q.shape), lse.reshape(q.shape[:-1]))
