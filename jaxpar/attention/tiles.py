"""Attention of any number of queries over any number of keys, in tiles that are left out where no query sees a key."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.attention.online import Cells, Sums, added, closed, opened
from jaxpar.attention.partial import Partial, Window, no_keys
from jaxpar.collectives.types import match_varying
from jaxpar.plan import Phase

TILE_ROWS, KEY_TILE = 256, 128
"""Rows (queries, times the heads that share their keys) and keys of one tile in prefill: scores that stay in a core's
cache, and no operation large enough for XLA:CPU to deal it out to threads."""

DECODE_KEY_TILE = 1024
"""Keys of one tile when each request has a single query."""


FIXED_ROWS, FIXED_KEYS = 64, 128
"""Rows and keys of the tiles of a plan with `fixed_order`: larger ones are filled up further for a short prompt."""


class Tiles(NamedTuple):
    """The tiles of `queries` and `keys` that `attend` cuts its work into; `part` of the keys can be left out of one."""

    queries: int
    keys: int
    part: int


def tile_sizes(queries: int, keys: int, group: int, fixed: Phase | None = None) -> Tiles:
    """Tiles for `queries`, of each of which `group` heads share their keys; a smaller problem is one tile.

    With `fixed`, the phase, they are the same for any number of queries and keys.
    """
    if fixed is not None:
        rows = 1 if fixed == "decode" else 1 << (max(FIXED_ROWS // group, 1).bit_length() - 1)
        return Tiles(rows, FIXED_KEYS, FIXED_KEYS)
    if queries == 1:
        return Tiles(1, min(keys, DECODE_KEY_TILE), min(keys, DECODE_KEY_TILE))
    most = 1 << (max(TILE_ROWS // group, 1).bit_length() - 1)
    q, k = min(queries, most, KEY_TILE), min(keys, KEY_TILE)
    return Tiles(q, k, k // 2 if q < k and k % 2 == 0 else k)


def attend_flops(
    lanes: int,
    heads: int,
    group: int,
    queries: int,
    keys: int,
    key_size: int,
    value_size: int,
    fixed: Phase | None = None,
) -> int:
    """FLOPs of `attend` for `queries` and `keys` of each lane and `heads` query heads, every tile counted."""
    tile = tile_sizes(queries, keys, group, fixed)
    tiles = -(-queries // tile.queries) * -(-keys // tile.keys)
    return 2 * lanes * heads * tiles * tile.queries * tile.keys * (key_size + value_size)


def seen_tiles(q_positions: Any, k_positions: Any, q_tile: int, k_tile: int, window: Window) -> Any:
    """Which tiles [B, queries / q_tile, keys / k_tile] are computed; numpy or JAX arrays, padded to whole tiles.

    A tile is left out if its earliest key is later than its last query, or its last key out of the window of its first
    query: of a causal mask these are exactly the tiles in which no query sees a key.
    """
    xp = q_positions.__array_namespace__()
    never = xp.iinfo(xp.int32).max
    q, k = _by_tile(q_positions, q_tile), _by_tile(k_positions, k_tile)
    first_key = xp.where(k >= 0, k, never).min(axis=2)
    seen = first_key[:, None, :] <= q.max(axis=2)[:, :, None]
    if window is not None:
        first_query = xp.where(q >= 0, q, never).min(axis=2)
        # Not `first_query - last_key < window`: the first query of a tile of padding is as large as an int can be.
        seen = seen & (first_query[:, :, None] < (k.max(axis=2) + window)[:, None, :])
    return seen


def full_tiles(q_positions: jax.Array, k_positions: jax.Array, q_tile: int, k_tile: int, window: Window) -> jax.Array:
    """The tiles [B, queries / q_tile, keys / k_tile] in which every query sees every key: nothing is masked there."""
    q, k = _by_tile(q_positions, q_tile), _by_tile(k_positions, k_tile)
    first_key, last_key = k.min(axis=2)[:, None, :], k.max(axis=2)[:, None, :]
    full = (first_key >= 0) & (last_key <= q.min(axis=2)[:, :, None])
    return full if window is None else full & (q.max(axis=2)[:, :, None] - first_key < window)


def _by_tile(positions: Any, tile: int) -> Any:
    return positions.reshape(positions.shape[0], -1, tile)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_positions: jax.Array,
    k_positions: jax.Array,
    window: Window,
    scale: float,
    onto: Partial | None = None,
    fixed: Phase | None = None,
) -> Partial:
    """Attention of grouped queries over a bag of keys, tile by tile (FlashAttention, arXiv:2205.14135).

             keys ->  | 128 | 128 | 128 | 128 |
    queries  128      |  m  |     |     |     |      m  some query sees some key: computed, with a mask
             128      |  f  |  m  |     |     |      f  every query sees every key: computed without one
             128      |  f  |  f  |  m  |     |      the others are left out

    Args:
        q: [K, B, T, G, d], the G query heads that share each of K KV heads.
        k: [K, B, S, d], in any order; entries whose position is -1 may hold anything, NaN too.
        v: the same for values, which may be of another size.
        q_positions: [B, T] global positions, -1 for padding.
        k_positions: [B, S] global positions, -1 for entries that hold no key.
        window: tokens of the sliding window, or None.
        scale: on the scores; positive.
        onto: the partial result of the same queries over other keys, which the result then includes.
        fixed: the phase, where tiles and what is computed together must not depend on how much there is.

    Returns:
        Partial of [K, B, T, G, d], d that of the values.
    """
    heads, lanes, queries, group, _ = q.shape
    sizes = tile_sizes(queries, k.shape[2], group, fixed)
    if fixed is None and sizes.queries == queries and sizes.keys == k.shape[2]:
        start = None if onto is None else opened(onto)
        return closed(added(start, Cells(q, k, v, q_positions, k_positions), window, scale))

    def cells(x: jax.Array, tile: int) -> jax.Array:
        """[K, B, length, ...] -> [1, K * B, whole tiles, ...]."""
        x = in_whole_blocks(x, 2, tile, 0)
        return x.reshape(1, heads * lanes, *x.shape[2:])

    def alike(x: jax.Array) -> jax.Array:
        """[B, ...] -> [K * B, ...]: the same for every KV head."""
        return jnp.tile(x, (heads, *[1] * (x.ndim - 1)))

    at = in_whole_blocks(q_positions, 1, sizes.queries, -1), in_whole_blocks(k_positions, 1, sizes.keys, -1)
    work = _Work(
        Cells(cells(q, sizes.queries), cells(k, sizes.keys), cells(v, sizes.keys), *(alike(x)[None] for x in at)),
        alike(seen_tiles(*at, sizes.queries, sizes.part, window)),
        alike(full_tiles(*at, sizes.queries, sizes.keys, window)),
        None if onto is None else Partial(*(cells(x, sizes.queries) for x in onto)),
    )
    one, all_cells = (partial(_in_tiles, sizes, window, scale, count) for count in (1, heads * lanes))
    # A core works best on one cell at a time, in its cache; an accelerator on all at once, and so does decode, with
    # little work in each. How many there are must not matter where shapes are fixed.
    if fixed is not None:
        done = one(work)
    else:
        done = all_cells(work) if queries == 1 else lax.platform_dependent(work, cpu=one, default=all_cells)
    return Partial(*(x[0, :, :queries].reshape(heads, lanes, queries, *x.shape[3:]) for x in done))


def in_whole_blocks(x: jax.Array, axis: int, block: int, value: int = 0) -> jax.Array:
    """Pad `axis` with `value` to whole blocks."""
    widths = [(0, -x.shape[axis] % block if dim == axis else 0, 0) for dim in range(x.ndim)]
    return lax.pad(x, jnp.asarray(value, x.dtype), widths)


class _Work(NamedTuple):
    """[1, C] `cells`, with positions of that shape too; by cell the parts of tiles that are seen, and full tiles."""

    cells: Cells
    seen: jax.Array
    full: jax.Array
    onto: Partial | None


def _in_tiles(sizes: Tiles, window: Window, scale: float, count: int, work: _Work) -> Partial:
    """`attend` for whole tiles, `count` cells at a time."""
    x, parts = work.cells, sizes.keys // sizes.part
    seen = work.seen.reshape(-1, count, *work.seen.shape[1:]).any(axis=1)
    full = work.full.reshape(-1, count, *work.full.shape[1:]).all(axis=1)
    blocks, rows, columns = full.shape
    kind = jnp.where(full, 2, seen.reshape(*full.shape, parts).any(axis=3).astype(jnp.int32))
    used = seen.any(axis=2)

    def row(index: jax.Array, done: Partial) -> Partial:
        block, row = lax.div(index, rows), lax.rem(index, rows)
        q_start = row * sizes.queries

        def at(start: Any, array: jax.Array) -> tuple[Any, ...]:
            return (0, block * count, start, *[0] * (array.ndim - 3))

        def cut(array: jax.Array, start: Any, length: int) -> jax.Array:
            shape = (1, count, length, *array.shape[3:])
            return lax.dynamic_slice(array, at(start, array), shape, allow_negative_indices=False)

        def whole(done: Partial, fresh: bool = False) -> Partial:
            q = cut(x.q, q_start, sizes.queries)

            def add(sums: Sums, k_start: Any, length: int, full: bool = False) -> Sums:
                k, v, k_at = (cut(y, k_start, length) for y in (x.k, x.v, x.k_positions))
                q_at = cut(x.q_positions, q_start, sizes.queries)
                return added(sums, Cells(q, k, v, q_at[0], k_at[0]), window, scale, full)

            def tile(column: jax.Array, sums: Sums) -> Sums:
                def some(sums: Sums) -> Sums:
                    for place in (column * parts + part for part in range(parts)):
                        with_part = partial(add, k_start=place * sizes.part, length=sizes.part)
                        sums = lax.cond(seen[block, row, place], with_part, _same, sums)
                    return sums

                every = partial(add, k_start=column * sizes.keys, length=sizes.keys, full=True)
                return lax.switch(kind[block, row, column], (_same, some, every), sums)

            held = (
                no_keys(q, x.v.shape[-1], x.k, x.v)
                if fresh
                else Partial(*(cut(y, q_start, sizes.queries) for y in done))
            )
            ended = closed(lax.fori_loop(0, columns, tile, opened(held)))
            into = zip(done, ended, strict=True)
            return Partial(
                *(lax.dynamic_update_slice(y, z, at(q_start, y), allow_negative_indices=False) for y, z in into)
            )

        return whole(done, fresh=True) if work.onto is None else lax.cond(used[block, row], whole, _same, done)

    # A result that starts from nothing starts as some of the queries, all of which is overwritten: fresh zeros would
    # depend on nothing, and XLA would make those of all layers before the first of them runs.
    any_value = match_varying(x.q[..., 0].astype(jnp.float32), x.k, x.v)
    any_values = jnp.broadcast_to(any_value[..., None], (*any_value.shape, x.v.shape[-1]))
    start = Partial(any_values, any_value) if work.onto is None else work.onto
    return lax.fori_loop(0, blocks * rows, row, start)


def _same(x: Any) -> Any:
    return x
