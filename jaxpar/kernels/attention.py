"""Attention of queries over a bag of keys, as each backend computes it best.

    CPU    tiles of XLA operations (`attention/tiles.py`)
    TPU    a kernel that takes positions as data (`kernels/tpu_flash.py`), in decode one that reads pages
           where they lie (`kernels/tpu_paged.py`)

Where shapes must not matter (`fixed`) all backends run the tiles.
"""

from __future__ import annotations

from functools import partial

import jax

from jaxpar.attention import tiles
from jaxpar.attention.partial import Partial, Window
from jaxpar.attention.store import Pages
from jaxpar.kernels import tpu_flash, tpu_paged
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

    kernel = partial(tpu_flash.attend, window=window, scale=scale)
    return by_backend(q, k, v, q_positions, k_positions, onto, tpu=kernel, default=in_tiles)


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
        return attend(q, *bag, q_at, k_at, window, scale)

    def in_pages(q: jax.Array, bag: Bag, pages: Pages, q_at: jax.Array, k_at: jax.Array) -> Partial:
        return tpu_paged.attend(q, pages, q_at, k_at, window, scale)

    paged = in_pages if tpu_paged.fits(pages) else None
    return by_backend(q, bag, pages, q_positions, k_positions, tpu=paged, default=in_tiles)
