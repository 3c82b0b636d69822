"""Decode attention on TPUs by JAX's own kernel for pages (`jax.experimental.pallas.ops.tpu.paged_attention`).

It masks by length and gives no LSE: for requests whose keys all lie here, in the order of their positions (cp = 1).
"""

from __future__ import annotations

import inspect
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

from jaxpar.attention.partial import Window
from jaxpar.attention.store import Pages
from jaxpar.attention.tiles import attend_flops
from jaxpar.kernels import tpu_paged
from jaxpar.kernels.costed import costed
from jaxpar.kernels.typed import of_jax

KEYS = 512
"""Keys of a block, at most: 32 pages of 16, of one KV head."""

IDS = 1 << 17
"""Page ids at most: a core has 1 MiB of memory for scalars (SMEM), and all of them lie there."""


def fits(pages: Pages, window: Window) -> bool:
    """Whether the kernel takes these, and gives what ours does."""
    return (
        window is None  # It masks by length alone.
        and pages.k.dtype == jnp.bfloat16  # It computes in that, whatever it is given.
        and pages.k.shape == pages.v.shape  # One block spec serves both.
        and tpu_paged.fits(pages)  # It copies page by page.
        and pages.table.size <= IDS
    )


def attend(q: jax.Array, pages: Pages, q_positions: jax.Array, scale: float, interpret: bool = False) -> jax.Array:
    """Attention [K, B, 1, G, d] float32 of one query of each request over all its keys.

    Args:
        q: [K, B, 1, G, d].
        pages: of the cache; key i of a request has position i. Slots without a key in a request's last page must be
            finite: they get weight 0, and 0 x NaN is NaN.
        q_positions: [B, 1], -1 for padding, whose output is 0.
        scale: on the scores.
        interpret: as XLA operations, on any backend.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    two_cores = device is not None and device.platform == "tpu" and device.num_cores == 2
    return _paged_attention(q, pages, q_positions, scale, two_cores, interpret)


# Traced once for all layers: a kernel takes long to trace.
@partial(jax.jit, static_argnames=("scale", "two_cores", "interpret"))
def _paged_attention(
    q: jax.Array, pages: Pages, q_positions: jax.Array, scale: float, two_cores: bool, interpret: bool
) -> jax.Array:
    heads, lanes, _, group, size = q.shape
    page_size, width = pages.k.shape[2], pages.table.shape[1]
    in_block = min(max(KEYS // page_size, 1), width)
    lengths = q_positions[:, 0] + 1
    # Whole blocks are read, past the length too: there a request reads its own first page again, and nobody else's.
    real = jnp.arange(width, dtype=jnp.int32)[None] * page_size < lengths[:, None]
    table = jnp.maximum(jnp.where(real, pages.table, pages.table[:, :1]), 0)
    table = jnp.pad(table, ((0, 0), (0, -width % in_block)), mode="edge")
    # Sums are kept in the dtype of the queries.
    by_lane = (scale * q[:, :, 0].astype(jnp.float32)).transpose(1, 0, 2, 3).reshape(lanes, heads * group, size)
    split = None
    if two_cores:
        split = "batch" if lanes % 2 == 0 else "kv_head" if heads % 2 == 0 else None
    keys = width * page_size
    cost = pl.CostEstimate(
        flops=attend_flops(lanes, heads * group, group, 1, keys, size, size),
        transcendentals=lanes * heads * group * keys,
        bytes_accessed=2 * size * lanes * heads * (keys * pages.k.dtype.itemsize + 4 * group),
    )
    call = partial(inspect.unwrap(paged_attention), pages_per_compute_block=in_block, megacore_mode=split)
    out = of_jax(costed(call, cost, interpret), by_lane, pages.k, pages.v, lengths, table)
    return out.reshape(lanes, heads, 1, group, size).transpose(1, 0, 2, 3, 4)
