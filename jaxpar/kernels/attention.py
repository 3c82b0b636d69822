"""Attention of queries over a bag of keys, as each backend computes it best.

    CPU    tiles of XLA operations (`attention/tiles.py`)
    TPU    a kernel that takes positions as data (`kernels/tpu_flash.py`), in decode one that reads pages
           where they lie (`kernels/tpu_paged.py`), or where no LSE is asked for JAX's own (`kernels/tpu_jax_paged.py`)
    GPU    the same by one kernel (`kernels/gpu_flash.py`)

Where shapes must not matter (`fixed`) all backends run the tiles.
"""

from __future__ import annotations

from functools import partial

import jax

from jaxpar.attention import tiles
from jaxpar.attention.partial import Partial, Window
from jaxpar.attention.store import Pages
from jaxpar.kernels import gpu_flash, tpu_flash, tpu_jax_paged, tpu_paged
from jaxpar.kernels.backend import by_backend
from jaxpar.plan import Phase

Bag = tuple[jax.Array, jax.Array]
"""Keys and values [K, B, S, d] of each request in a row."""


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
    """Attention of grouped queries [K, B, T, G, d] over a bag of keys [K, B, S, d]: see `attention.tiles.attend`."""
    if fixed is not None:
        return tiles.attend(q, k, v, q_positions, k_positions, window, scale, onto, fixed)

    def in_tiles(
        q: jax.Array, k: jax.Array, v: jax.Array, q_at: jax.Array, k_at: jax.Array, onto: Partial | None
    ) -> Partial:
        return tiles.attend(q, k, v, q_at, k_at, window, scale, onto)

    kernel, on_gpu = (partial(of.attend, window=window, scale=scale) for of in (tpu_flash, gpu_flash))
    gpu = on_gpu if gpu_flash.fits(k, v) else None
    return by_backend(q, k, v, q_positions, k_positions, onto, tpu=kernel, gpu=gpu, default=in_tiles)


def attend_pages(
    q: jax.Array,
    bag: Bag,
    pages: Pages,
    q_positions: jax.Array,
    k_positions: jax.Array,
    window: Window,
    scale: float,
) -> Partial:
    """Attention of one query of each request [K, B, 1, G, d] over its keys, where they lie or in the bag of them.

    An implementation that reads `pages` leaves `bag`, which was gathered from them: nothing then makes it.
    """

    def in_tiles(q: jax.Array, bag: Bag, pages: Pages, q_at: jax.Array, k_at: jax.Array) -> Partial:
        return tiles.attend(q, *bag, q_at, k_at, window, scale)

    def on_tpu(q: jax.Array, bag: Bag, pages: Pages, q_at: jax.Array, k_at: jax.Array) -> Partial:
        if tpu_paged.fits(pages):
            return tpu_paged.attend(q, pages, q_at, k_at, window, scale=scale)
        return tpu_flash.attend(q, *bag, q_at, k_at, None, window, scale=scale)

    def on_gpu(q: jax.Array, bag: Bag, pages: Pages, q_at: jax.Array, k_at: jax.Array) -> Partial:
        return gpu_flash.attend_pages(q, pages, q_at, k_at, window, scale=scale)

    gpu = on_gpu if gpu_flash.fits(pages.k, pages.v) else None
    return by_backend(q, bag, pages, q_positions, k_positions, tpu=on_tpu, gpu=gpu, default=in_tiles)


def attend_own_pages(
    q: jax.Array,
    bag: Bag,
    pages: Pages,
    q_positions: jax.Array,
    k_positions: jax.Array,
    window: Window,
    scale: float,
) -> jax.Array:
    """The output of `attend_pages` where the pages hold all keys of a request, in the order of positions (cp = 1)."""

    def ours(q: jax.Array, bag: Bag, pages: Pages, q_at: jax.Array, k_at: jax.Array) -> jax.Array:
        return attend_pages(q, bag, pages, q_at, k_at, window, scale).out

    def by_jax(q: jax.Array, bag: Bag, pages: Pages, q_at: jax.Array, k_at: jax.Array) -> jax.Array:
        return tpu_jax_paged.attend(q, pages, q_at, scale)

    tpu = by_jax if tpu_jax_paged.fits(pages, window) else None
    return by_backend(q, bag, pages, q_positions, k_positions, tpu=tpu, default=ours)
