"""One new token of each request into its page of the cache, in place, on TPUs.

A scatter of XLA does the same, but it is counted as if it read and wrote the whole cache, and takes one page at a time.

    pages of the requests -> VMEM, all at once; each with its token in it; and back

What is copied between memories is whole tiles, 16 tokens of 16-bit numbers: a page, not a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxpar.kernels.tpu_sums import LANES, Ref
from jaxpar.kernels.typed import typed_like

PAGES = 4 << 20
"""Bytes of pages that a core has in its memory, at most."""


def fits(planes: Sequence[jax.Array]) -> bool:
    """Whether a page of every plane [K, pages, page_size, d] is made of whole tiles of a TPU's memory."""
    rows = 32 // planes[0].dtype.itemsize
    return all(plane.shape[2] % rows == 0 and plane.shape[3] % LANES == 0 for plane in planes)


# Traced once for all layers: a kernel takes long to trace.
@partial(jax.jit, static_argnames="interpret")
def write(
    planes: Sequence[jax.Array], new: Sequence[jax.Array], page: jax.Array, slot: jax.Array, interpret: bool = False
) -> list[jax.Array]:
    """The planes with a token of each request in them.

    Args:
        planes: [K, pages, page_size, d] of keys, values.
        new: for each plane what it keeps of the tokens [B, K, d].
        page: [B] ids of the pages, of which no two are the same; one that is no page is not written.
        slot: [B] places in the pages.
        interpret: as XLA operations, on any backend.
    """
    lanes, heads = new[0].shape[:2]
    of_lane = sum(plane[:, 0].size * plane.dtype.itemsize for plane in planes)
    together = max(size for size in range(1, lanes + 1) if lanes % size == 0 and (size == 1 or size * of_lane <= PAGES))
    real = (page >= 0) & (page < planes[0].shape[1])
    anywhere = pl.BlockSpec(memory_space=pl.ANY)

    def of_lanes(index: Any, *_: Ref) -> tuple[Any, ...]:
        return index, 0, 0, 0

    def kernel(page: Ref, slot: Ref, *refs: Ref) -> None:
        count = len(planes)
        tokens, written = refs[:count], refs[2 * count : 3 * count]
        buffers, arrived = refs[3 * count : 4 * count], refs[-1]
        first = pl.program_id(0) * together

        def each_lane(act: str, out: bool) -> None:
            def lane(index: Any, carry: None) -> None:
                where = page[first + index]

                @pl.when(where >= 0)
                def move() -> None:
                    for plane, buffer in zip(written, buffers, strict=True):
                        ends = plane.at[:, where], buffer.at[index]
                        moved = pltpu.make_async_copy(*(ends[::-1] if out else ends), arrived)
                        (moved.start if act == "start" else moved.wait)()

            lax.fori_loop(0, together, lane, None)

        def put(index: Any, carry: None) -> None:
            for token, buffer in zip(tokens, buffers, strict=True):
                held = buffer[index].astype(jnp.float32)
                here = lax.broadcasted_iota(jnp.int32, held.shape, 1) == slot[first + index]
                buffer[index] = jnp.where(here, token[index].astype(jnp.float32), held).astype(buffer.dtype)

        each_lane("start", out=False)
        each_lane("wait", out=False)
        lax.fori_loop(0, together, put, None)
        each_lane("start", out=True)
        each_lane("wait", out=True)

    call = pl.pallas_call(
        kernel,
        out_shape=[typed_like(plane, plane.shape, plane.dtype) for plane in planes],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(lanes // together,),
            in_specs=[
                *(pl.BlockSpec((together, heads, 1, x.shape[2]), of_lanes) for x in new),
                *(anywhere for _ in planes),
            ],
            out_specs=[anywhere for _ in planes],
            scratch_shapes=[
                *(pltpu.VMEM((together, heads, *plane.shape[2:]), plane.dtype) for plane in planes),
                pltpu.SemaphoreType.DMA,
            ],
        ),
        input_output_aliases={2 + len(planes) + index: index for index in range(len(planes))},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=2 * lanes * of_lane),
        interpret=interpret,
    )
    written: list[jax.Array] = call(jnp.where(real, page, -1), slot, *(x[:, :, None] for x in new), *planes)
    return written
