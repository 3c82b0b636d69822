"""Attention over a bag of keys as one GPU kernel: FlashAttention (arXiv:2205.14135) with positions as data.

    a cell      the queries of one lane that share a KV head; a row is one query of one of its heads
    a block     of keys; for each block of rows those that some query sees are listed, first those that all see

Lists take the place of branches: any layout over cp, prefixes, padding and sliding windows are one kernel. Where
cells and rows are few, as in decode, the list is dealt out to several of the grid, whose partial results are merged
(Flash-Decoding). Keys are read from the bag, or where they lie, in the pages of the cache (arXiv:2309.06180).
"""

from __future__ import annotations

import functools
import operator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxpar.attention.partial import NO_WINDOW, Partial, Window, merge_all
from jaxpar.attention.store import Pages
from jaxpar.attention.tiles import attend_flops, full_tiles, in_whole_blocks, seen_tiles
from jaxpar.kernels.triton_call import LEAST, Ref, dot, fitting_block, triton_call

ROWS, KEYS = 128, 64
"""Rows and keys of a block: with heads of 128 the results, in registers, and two blocks of keys and values fit."""

AT_ONCE = 264
"""Two for each of the 132 cores of an H200: as many of the grid as are worth splitting keys for."""

MOST_SPLITS = 16

MOST_SIZE = 256
"""Numbers of a key or a value, at most: with more, blocks and results leave the registers."""

MOST_BYTES = 1024
"""Bytes of a key with its value, at most: three blocks under way take 192 of the 227 KiB that a core shares."""


class _Lists(NamedTuple):
    """Blocks of keys of each lane and block of rows: [B, R, C] block numbers, [B, R] how many are full and seen."""

    blocks: jax.Array
    full: jax.Array
    seen: jax.Array


def fits(k: jax.Array, v: jax.Array) -> bool:
    """Whether the kernel takes these: whole blocks of numbers, and places in the planes that an int32 can count."""
    small = all(x.shape[-1] <= MOST_SIZE and x.size < 1 << 31 for x in (k, v))
    small = small and sum(x.shape[-1] * x.dtype.itemsize for x in (k, v)) <= MOST_BYTES
    return small and not k.shape[-1] % LEAST and len(_parts(v.shape[-1])) == 1 and v.shape[-1] >= LEAST


# Traced once for all layers: a kernel takes long to trace.
@partial(jax.jit, static_argnames=("scale", "interpret"))
def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_positions: jax.Array,
    k_positions: jax.Array,
    onto: Partial | None,
    window: Window,
    scale: float,
    interpret: bool = False,
) -> Partial:
    """What `attention.tiles.attend` gives; arrays as there. `interpret`: as XLA operations, on any backend."""
    block = fitting_block(k.shape[2], KEYS)
    k, v = (in_whole_blocks(x, 2, block) for x in (k, v))
    cells = q.shape[0] * q.shape[1]
    planes = [x.reshape(cells * x.shape[2], x.shape[3]) for x in (k, v)]
    return _attend(q, planes, None, q_positions, k_positions, block, onto, window, scale, interpret)


# Traced once for all layers: a kernel takes long to trace.
@partial(jax.jit, static_argnames=("scale", "interpret"))
def attend_pages(
    q: jax.Array,
    pages: Pages,
    q_positions: jax.Array,
    k_positions: jax.Array,
    window: Window,
    scale: float,
    interpret: bool = False,
) -> Partial:
    """`attend` over the keys [B, width * page_size] in the pages of each request, none of which is moved."""
    heads, count, page_size, _ = pages.k.shape
    lanes = q.shape[1]
    # An id that is no page holds no key, and a key of page 0 in its place is masked.
    page = jnp.arange(heads, dtype=jnp.int32)[:, None, None] * count + jnp.clip(pages.table, 0, count - 1)[None]
    slots = page[..., None] * page_size + jnp.arange(page_size, dtype=jnp.int32)[None, None, None]
    places = slots.reshape(heads * lanes, -1)
    block = fitting_block(places.shape[1], KEYS)
    planes = [x.reshape(-1, x.shape[-1]) for x in (pages.k, pages.v)]
    return _attend(
        q, planes, in_whole_blocks(places, 1, block), q_positions, k_positions, block, None, window, scale, interpret
    )


def _attend(
    q: jax.Array,
    planes: list[jax.Array],
    places: jax.Array | None,
    q_positions: jax.Array,
    k_positions: jax.Array,
    block: int,
    onto: Partial | None,
    window: Window,
    scale: float,
    interpret: bool,
) -> Partial:
    """Over planes [N, d] of keys and values, in which those of a cell lie at its `places` (None: in a row)."""
    heads, lanes, queries, group, size = q.shape
    rows, cells, value_size = queries * group, heads * lanes, planes[1].shape[-1]
    tile = fitting_block(rows, ROWS)
    q_at = in_whole_blocks(jnp.repeat(q_positions, group, axis=1), 1, tile, -1)
    k_at = in_whole_blocks(k_positions, 1, block, -1)
    lists = _lists(q_at, k_at, tile, block, window)
    tiles, blocks = lists.blocks.shape[1:]
    splits = max(1, min(AT_ONCE // (cells * tiles), MOST_SPLITS, blocks))
    width = jnp.asarray(NO_WINDOW if window is None else window, jnp.int32).reshape(1)
    held = [] if onto is None else [in_whole_blocks(x.reshape(cells, rows, *x.shape[4:]), 1, tile) for x in onto]
    optional = [*([] if places is None else [places]), *held]
    shape = (splits, cells, tiles * tile)
    call = triton_call(
        partial(_kernel, (tile, block, lanes, splits), places is not None, bool(held), window is not None, scale),
        grid=(tiles, cells, splits),
        shapes=[(*shape, value_size), shape],
        like=q,
        flops=attend_flops(lanes, heads * group, group, queries, k_positions.shape[1], size, value_size),
        bytes_accessed=sum(x.size * x.dtype.itemsize for x in (q, *planes)) + 4 * cells * rows * value_size,
        warps=4 if tile < ROWS else 8,
        interpret=interpret,
    )
    by_cell = in_whole_blocks(q.reshape(cells, rows, size), 1, tile)
    out, lse = call(*lists, q_at, k_at, width, by_cell, *planes, *optional)
    part = Partial(out[0], lse[0]) if splits == 1 else merge_all(Partial(out, lse))
    return Partial(*(x[:, :rows].reshape(heads, lanes, queries, group, *x.shape[2:]) for x in part))


def _lists(q_at: jax.Array, k_at: jax.Array, tile: int, block: int, window: Window) -> _Lists:
    seen, full = (of(q_at, k_at, tile, block, window) for of in (seen_tiles, full_tiles))
    kind = jnp.where(full, 0, jnp.where(seen, 1, 2))
    blocks = jnp.argsort(kind, axis=2, stable=True)
    counts = (full & seen).sum(axis=2), seen.sum(axis=2)
    return _Lists(*(x.astype(jnp.int32) for x in (blocks, *counts)))


def _kernel(
    sizes: tuple[int, int, int, int], paged: bool, on_top: bool, windowed: bool, scale: float, *refs: Ref
) -> None:
    tile, block, lanes, splits = sizes
    blocks, full, seen, q_at, k_at, window, q, k, v, *rest, out, lse = refs
    places = rest.pop(0) if paged else None
    row, cell, split = (pl.program_id(axis) for axis in range(3))
    lane = lax.rem(cell, lanes)
    keys = k_at.shape[1]
    mine = pl.ds(row * tile, tile)
    parts = [pl.ds(*part) for part in _parts(q.shape[-1])]
    queries = [q[cell, mine, part] for part in parts]
    query_at = q_at[lane, mine]
    rows, size = tile, v.shape[-1]

    def add(masked: bool, index: Any, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        values, top, total = sums
        start = blocks[lane, row, index] * block
        at = pl.ds(start, block)
        where = pl.ds(cell * keys + start, block) if places is None else places[cell, at]
        pairs = zip(queries, parts, strict=True)
        scores = functools.reduce(operator.add, (dot(query, k[where, part].T) for query, part in pairs)) * scale
        of_keys = v[where, :]
        if masked:
            key_at = k_at[lane, at]
            mask = (key_at >= 0)[None, :] & (key_at[None, :] <= query_at[:, None])
            if windowed:
                mask = mask & (query_at[:, None] - key_at[None, :] < window[0])
            scores = jnp.where(mask, scores, -jnp.inf)
            # An entry without a key may be NaN, which no weight hides.
            of_keys = jnp.where((key_at >= 0)[:, None], of_keys, jnp.zeros((), of_keys.dtype))
        higher = jnp.maximum(top, jnp.max(scores, axis=1))
        base = jnp.where(higher == -jnp.inf, 0.0, higher)
        weights, kept = jnp.exp(scores - base[:, None]), jnp.exp(top - base)
        values = values * kept[:, None] + dot(weights.astype(of_keys.dtype), of_keys)
        return values, higher, total * kept + jnp.sum(weights, axis=1)

    sums = jnp.zeros((rows, size), jnp.float32), jnp.full((rows,), -jnp.inf), jnp.zeros((rows,), jnp.float32)
    if on_top:
        before, of_before = rest
        held = jnp.where(split == 0, of_before[cell, mine], -jnp.inf)
        nothing = held == -jnp.inf
        sums = jnp.where(nothing[:, None], 0.0, before[cell, mine, :]), held, jnp.where(nothing, 0.0, 1.0)
    of_full, of_all = full[lane, row], seen[lane, row]
    share = lax.div(of_all + (splits - 1), splits)
    first = split * share
    last = jnp.minimum(first + share, of_all)
    middle = jnp.clip(of_full, first, jnp.maximum(first, last))
    sums = lax.fori_loop(first, middle, partial(add, False), sums)
    values, top, total = lax.fori_loop(middle, last, partial(add, True), sums)
    safe = jnp.where(total == 0, 1.0, total)
    out[split, cell, mine, :] = values / safe[:, None]
    lse[split, cell, mine] = jnp.where(total == 0, -jnp.inf, top + jnp.log(safe))


def _parts(size: int) -> list[tuple[int, int]]:
    """Starts and lengths of the powers of 2 that make up `size`, the largest first: 192 is 128 and 64."""
    bits = [1 << bit for bit in reversed(range(size.bit_length())) if size >> bit & 1]
    return [(sum(bits[:number]), length) for number, length in enumerate(bits)]
