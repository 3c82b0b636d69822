"""Attention over a bag of keys as one TPU kernel: FlashAttention (arXiv:2205.14135) with positions as data.

    grid       cells (KV head, lane) x blocks of rows x blocks of keys, which run in turn and add up in VMEM
    a row      one query of one of the heads that share the KV head
    a block    left out where no query sees a key, and not read again; without a mask where every query sees every key

The first and last positions of all blocks are prefetched as scalars, so that a block is chosen before it is read. Masks
come from positions alone: any layout over cp, prefixes, padding and sliding windows are one kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxpar.attention.partial import NO_WINDOW, Partial, Window
from jaxpar.attention.tiles import attend_flops, in_whole_blocks
from jaxpar.kernels.tpu_sums import (
    LANES,
    Ref,
    Sums,
    add_keys,
    close_sums,
    open_sums,
    reopen_sums,
    sums_in_vmem,
    to_column,
    to_row,
    without_nothing,
)
from jaxpar.kernels.typed import typed_like

ROWS, KEYS = 512, 512
"""Rows and keys of a block: what is read of keys is used for 512 FLOPs a byte, and a v5p computes 166 in its time."""

NEVER = jnp.iinfo(jnp.int32).max


class _Bounds(NamedTuple):
    """Of a block's positions [blocks]: the least, the least that is not padding, and the greatest."""

    least: Any
    first: Any
    last: Any


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
    heads, lanes, queries, group, size = q.shape
    rows, keys, value_size = queries * group, k.shape[2], v.shape[3]
    cells, q_block, k_block = heads * lanes, _block(rows, ROWS), _block(keys, KEYS)
    q_at = in_whole_blocks(jnp.repeat(q_positions, group, axis=1), 1, q_block, -1)
    k_at = in_whole_blocks(k_positions, 1, k_block, -1)
    by_cell = [
        in_whole_blocks(x.reshape(cells, length, x.shape[-1]), 1, block)
        for x, length, block in ((q, rows, q_block), (k, keys, k_block), (v, keys, k_block))
    ]
    grid = (cells, q_at.shape[1] // q_block, k_at.shape[1] // k_block)
    held = [] if onto is None else _by_row(onto, cells, q_block)
    scalars = [
        jnp.asarray(NO_WINDOW if window is None else window, jnp.int32).reshape(1),
        *_bounds(q_at, q_block),
        *_bounds(k_at, k_block),
    ]
    seen = partial(_seen, lanes, grid)

    def of_keys(cell: Any, row: Any, column: Any, *scalars: Ref) -> tuple[Any, ...]:
        # One that is left out is none of its own: that which the next row of blocks begins with.
        return cell, jnp.where(seen(scalars, cell, row, column), column, 0), 0

    def of_key_positions(cell: Any, row: Any, column: Any, *scalars: Ref) -> tuple[Any, ...]:
        return jax.lax.rem(cell, lanes), 0, of_keys(cell, row, column, *scalars)[1]

    def of_rows(cell: Any, row: Any, column: Any, *scalars: Ref) -> tuple[Any, ...]:
        return cell, row, 0

    def of_row_values(cell: Any, row: Any, column: Any, *scalars: Ref) -> tuple[Any, ...]:
        return cell, 0, row

    def of_row_positions(cell: Any, row: Any, column: Any, *scalars: Ref) -> tuple[Any, ...]:
        return jax.lax.rem(cell, lanes), 0, row

    outs = [
        pl.BlockSpec((None, q_block, value_size), of_rows),
        pl.BlockSpec((None, 1, q_block), of_row_values),
    ]
    of_q, of_k, of_v = (x.size * x.dtype.itemsize for x in by_cell)
    # Every block counts, as FLOPs do: which are left out is known only when it runs.
    bytes_accessed = of_q + grid[1] * (of_k + of_v) + sum(4 * x.size for x in held)
    kernel = pl.pallas_call(
        partial(_kernel, seen, lanes, window is not None, scale),
        out_shape=[
            typed_like(q, (cells, grid[1] * q_block, value_size)),
            typed_like(q, (cells, 1, grid[1] * q_block)),
        ],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=grid,
            in_specs=[
                pl.BlockSpec((None, 1, q_block), of_row_positions),
                pl.BlockSpec((None, 1, k_block), of_key_positions),
                pl.BlockSpec((None, q_block, size), of_rows),
                pl.BlockSpec((None, k_block, size), of_keys),
                pl.BlockSpec((None, k_block, value_size), of_keys),
                *(outs if held else ()),
            ],
            out_specs=outs,
            scratch_shapes=sums_in_vmem(q_block, size=value_size),
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=attend_flops(lanes, heads * group, group, queries, keys, size, value_size),
            transcendentals=cells * rows * keys,
            bytes_accessed=bytes_accessed + 4 * cells * rows * (value_size + 1),
        ),
        interpret=interpret,
    )
    out, lse = kernel(*scalars, q_at[:, None], k_at[:, None], *by_cell, *held)
    shape = (heads, lanes, queries, group)
    return Partial(out[:, :rows].reshape(*shape, value_size), lse[:, 0, :rows].reshape(shape))


def _kernel(seen: Callable[..., Any], lanes: int, windowed: bool, scale: float, *refs: Ref) -> None:
    *scalars, q_at, k_at, q, k, v = refs[:12]
    *held, out, lse, of_values, top, total = refs[12:]
    sums = Sums(of_values, top, total)
    cell, row, column = (pl.program_id(axis) for axis in range(3))

    @pl.when(column == 0)
    def start() -> None:
        if held:
            reopen_sums(sums, held[0][...], to_column(held[1][...]))
        else:
            open_sums(sums)

    window = scalars[0][0]
    visible = seen(scalars, cell, row, column)
    full = _full(scalars, lanes, cell, row, column)

    @pl.when(visible & full)
    def unmasked() -> None:
        add_keys(sums, q[...], k[...], v[...], None, scale)

    @pl.when(visible & ~full)
    def with_mask() -> None:
        query, key = to_column(q_at[...]), k_at[...]
        mask = (key >= 0) & (key <= query)
        if windowed:
            mask = mask & (query - key < window)
        add_keys(sums, q[...], k[...], without_nothing(v[...], to_column(key) >= 0), mask, scale)

    @pl.when(column == pl.num_programs(2) - 1)
    def finish() -> None:
        out[...], of_row = close_sums(sums)
        lse[...] = to_row(of_row)


def _seen(lanes: int, grid: tuple[int, int, int], scalars: Any, cell: Any, row: Any, column: Any) -> Any:
    """Whether a block is computed: `attention.tiles.seen_tiles`."""
    window, *_ = scalars
    lane = jax.lax.rem(cell, lanes)
    q, k = (lane * grid[1] + row), (lane * grid[2] + column)
    of_q, of_k = _Bounds(*scalars[1:4]), _Bounds(*scalars[4:7])
    return (of_k.first[k] <= of_q.last[q]) & (of_q.first[q] < of_k.last[k] + window[0])


def _full(scalars: Any, lanes: int, cell: Any, row: Any, column: Any) -> Any:
    """Whether every query of a block sees every key: `attention.tiles.full_tiles`."""
    window, *_ = scalars
    lane = jax.lax.rem(cell, lanes)
    q, k = lane * pl.num_programs(1) + row, lane * pl.num_programs(2) + column
    of_q, of_k = _Bounds(*scalars[1:4]), _Bounds(*scalars[4:7])
    first = of_k.least[k]
    return (first >= 0) & (of_k.last[k] <= of_q.least[q]) & (of_q.last[q] - first < window[0])


def _bounds(positions: jax.Array, block: int) -> _Bounds:
    """Of positions [B, whole blocks], by lane and block."""
    blocks = positions.reshape(-1, block)
    first = jnp.where(blocks >= 0, blocks, NEVER).min(axis=1)
    return _Bounds(blocks.min(axis=1), first, blocks.max(axis=1))


def _block(length: int, most: int) -> int:
    return min(-(-length // LANES) * LANES, most)


def _by_row(part: Partial, cells: int, block: int) -> list[jax.Array]:
    """A partial result as the kernel takes and gives it: [cells, rows, d], and the LSE [cells, 1, rows]."""
    out = part.out.reshape(cells, -1, part.out.shape[-1])
    return [in_whole_blocks(out, 1, block), in_whole_blocks(part.lse.reshape(cells, 1, -1), 2, block)]
