"""Decode attention on TPUs that reads keys and values where they lie, in the pages of the cache (arXiv:2309.06180).

    gathered     pages -> a request's keys in a row -> attention      each key read, written and read again
    here         pages ----------------------------> attention        each key read once

A block is so many pages of one request. Blocks in which the request's query sees a key are put in a row, those of all
requests one after the other, and while one is computed the next is copied into the core's memory (VMEM). Masks come
from the positions of what a page holds, so that pages may be filled in any order, by any rank of cp.

    requests     a: blocks 0 1 2    b: none    c: blocks 4 5
    work         a0 a1 a2 b- c4 c5                              one each at least, which then says that no key was seen

Requests are dealt over the two cores of a chip that has two (v4, v5p).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxpar.attention.partial import NO_WINDOW, Partial, Window
from jaxpar.attention.store import Pages
from jaxpar.attention.tiles import attend_flops, full_tiles, in_whole_blocks, seen_tiles
from jaxpar.kernels import tpu_write
from jaxpar.kernels.tpu_sums import (
    LANES,
    Ref,
    Sums,
    add_keys,
    close_sums,
    open_sums,
    sums_in_vmem,
    to_column,
    without_nothing,
)
from jaxpar.kernels.typed import typed_like

KEYS = 512
"""Keys of a block, at most: 32 pages of 16."""

BUFFERS = 8 << 20
"""Bytes of the blocks that a core has in its memory, at most: of keys and values, one computed and one on its way."""


class _Work(NamedTuple):
    """Items of each core [cores, items]: `number` [cores] of them are real, and those after repeat the last.

    `lane` is the request, `block` the place among all blocks [B * blocks], `full` whether nothing is masked.
    """

    number: jax.Array
    lane: jax.Array
    block: jax.Array
    full: jax.Array


def fits(pages: Pages) -> bool:
    """Whether a page is made of whole tiles of a TPU's memory, which is what can be copied."""
    return tpu_write.fits([pages.k, pages.v])


# Traced once for all layers: a kernel takes long to trace.
@partial(jax.jit, static_argnames=("scale", "interpret"))
def attend(
    q: jax.Array,
    pages: Pages,
    q_positions: jax.Array,
    k_positions: jax.Array,
    window: Window,
    scale: float,
    interpret: bool = False,
) -> Partial:
    """Attention of one query of each request over the keys in its pages.

    Args:
        q: [K, B, 1, G, d], the G query heads that share each of K KV heads.
        pages: of the cache; an id that is no page is negative.
        q_positions: [B, 1], -1 for padding.
        k_positions: [B, width * page_size], of all that the pages hold; -1 for entries without a key.
        window: tokens of the sliding window, or None.
        scale: on the scores.
        interpret: as XLA operations, on any backend.

    Returns:
        Partial of [K, B, 1, G, d].
    """
    heads, lanes, _, group, size = q.shape
    page_size, value_size = pages.k.shape[2], pages.v.shape[3]
    in_block = _pages_a_block(pages)
    keys = in_block * page_size
    table = in_whole_blocks(pages.table, 1, in_block, -1).reshape(-1, 1, in_block)
    positions = in_whole_blocks(k_positions, 1, keys, -1)
    width = jnp.asarray(NO_WINDOW if window is None else window, jnp.int32).reshape(1)
    work = _work_of(q_positions, positions, keys, width[0])
    cores, items = work.lane.shape

    def here(core: Any, item: Any, number: Ref, lane: Ref, block: Ref, *_: Ref) -> tuple[Any, ...]:
        return block[core * items + item], 0, 0

    def following(core: Any, item: Any, number: Ref, lane: Ref, block: Ref, *_: Ref) -> tuple[Any, ...]:
        return block[core * items + jnp.minimum(item + 1, items - 1)], 0, 0

    def of_lane(core: Any, item: Any, number: Ref, lane: Ref, *_: Ref) -> tuple[Any, ...]:
        return lane[core * items + item], 0, 0, 0

    scalars = [*(x.reshape(-1).astype(jnp.int32) for x in work), q_positions[:, 0], width]
    itemsize = pages.k.dtype.itemsize
    read = lanes * heads * k_positions.shape[1] * (size + value_size) * itemsize + positions.size * 4
    kernel = pl.pallas_call(
        partial(_kernel, items, scale),
        out_shape=[typed_like(q, (lanes, heads, group, width)) for width in (value_size, 1)],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(cores, items),
            in_specs=[
                pl.BlockSpec((None, 1, in_block), here, memory_space=pltpu.SMEM),
                pl.BlockSpec((None, 1, in_block), following, memory_space=pltpu.SMEM),
                pl.BlockSpec((None, 1, keys), here),
                pl.BlockSpec((None, heads, group, size), of_lane),
                pl.BlockSpec(memory_space=pl.ANY),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=[pl.BlockSpec((None, heads, group, width), of_lane) for width in (value_size, 1)],
            scratch_shapes=[
                *(pltpu.VMEM((2, in_block, heads, *plane.shape[2:]), plane.dtype) for plane in (pages.k, pages.v)),
                pltpu.SemaphoreType.DMA((2,)),
                *sums_in_vmem(heads, group, size=value_size),
            ],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=attend_flops(lanes, heads * group, group, 1, k_positions.shape[1], size, value_size),
            transcendentals=lanes * heads * group * k_positions.shape[1],
            bytes_accessed=read + lanes * heads * group * (size * itemsize + 4 * value_size + 4),
        ),
        interpret=interpret,
    )
    by_lane = q[:, :, 0].transpose(1, 0, 2, 3)
    out, lse = kernel(*scalars, table, table, positions.reshape(-1, 1, keys), by_lane, pages.k, pages.v)
    return Partial(out.transpose(1, 0, 2, 3)[:, :, None], lse[..., 0].transpose(1, 0, 2)[:, :, None])


def _kernel(items: int, scale: float, *refs: Ref) -> None:
    number, lane, _, full, q_at, window, page_ids, next_ids, k_at, q, k_plane, v_plane = refs[:12]
    out, lse, k_block, v_block, arrived, of_values, top, total = refs[12:]
    core, item = pl.program_id(0), pl.program_id(1)
    mine, last = core * items + item, number[core] - 1
    heads, slot = k_plane.shape[0], lax.rem(item, 2)

    def each_page(ids: Ref, slot: Any, act: str) -> None:
        def page(index: Any, carry: None) -> None:
            where = ids[0, index]

            @pl.when(where >= 0)
            def copy() -> None:
                for plane, into in ((k_plane, k_block), (v_plane, v_block)):
                    moved = pltpu.make_async_copy(plane.at[:, where], into.at[slot, index], arrived.at[slot])
                    getattr(moved, act)()

        lax.fori_loop(0, k_block.shape[1], page, None)

    @pl.when(item == 0)
    def first_item() -> None:
        each_page(page_ids, slot, "start")

    @pl.when(item < last)
    def next_item() -> None:
        each_page(next_ids, 1 - slot, "start")

    sums = Sums(of_values, top, total)
    request = lane[mine]

    @pl.when((item == 0) | (lane[jnp.maximum(mine - 1, 0)] != request))
    def start_request() -> None:
        open_sums(sums)

    def add(mask: jax.Array | None, holds_key: jax.Array | None) -> None:
        for head in range(heads):
            keys, values = (x[slot, :, head].reshape(-1, x.shape[-1]) for x in (k_block, v_block))
            values = values if holds_key is None else without_nothing(values, holds_key)
            add_keys(Sums(*(x.at[head] for x in sums)), q[head], keys, values, mask, scale)

    @pl.when(item <= last)
    def compute() -> None:
        each_page(page_ids, slot, "wait")

        @pl.when(full[mine] == 1)
        def unmasked() -> None:
            add(None, None)

        @pl.when(full[mine] == 0)
        def with_mask() -> None:
            key = k_at[...]
            query = q_at[request]
            seen = (key >= 0) & (key <= query) & (query - key < window[0])
            add(seen, to_column(key) >= 0)

    @pl.when((item == last) | ((item < last) & (lane[jnp.minimum(mine + 1, core * items + items - 1)] != request)))
    def finish() -> None:
        for head in range(heads):
            out[head], lse[head] = close_sums(Sums(*(x.at[head] for x in sums)))


def _work_of(q_positions: jax.Array, k_positions: jax.Array, block_size: int, window: jax.Array) -> _Work:
    """The work on keys of positions [B, whole blocks of `block_size`] for a query [B, 1] of each request."""
    seen, full = (of(q_positions, k_positions, 1, block_size, window)[:, 0] for of in (seen_tiles, full_tiles))
    lanes, blocks = seen.shape
    seen = seen.at[:, 0].set(seen[:, 0] | ~seen.any(axis=1))
    cores = 2 if lanes % 2 == 0 else 1
    seen = seen.reshape(cores, -1)
    number = seen.sum(axis=1, dtype=jnp.int32)
    order = jnp.argsort(~seen, axis=1, stable=True).astype(jnp.int32)
    place = jnp.minimum(jnp.arange(seen.shape[1], dtype=jnp.int32)[None], number[:, None] - 1)
    offset = jnp.arange(cores, dtype=jnp.int32)[:, None] * seen.shape[1]
    block = jnp.take_along_axis(order, place, axis=1) + offset
    return _Work(number, block // blocks, block, full.reshape(-1)[block])


def _pages_a_block(pages: Pages) -> int:
    """So many that a block is whole rows of LANES keys."""
    heads, _, page_size, size = pages.k.shape
    of_key = 2 * heads * (size + pages.v.shape[3]) * pages.k.dtype.itemsize
    step = LANES // math.gcd(LANES, page_size)
    most = min(KEYS, BUFFERS // of_key, pages.table.shape[1] * page_size)
    return max(most // (step * page_size), 1) * step
