"""How a step stores its keys and values in the pages of the cache, and reads those of its requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.attention.cache import Planes
from jaxpar.kernels import tpu_write
from jaxpar.kernels.backend import by_backend


class Pages(NamedTuple):
    """Where a layer's keys and values lie: planes [K, pages, page_size, d], and page ids [B, width] of the requests."""

    k: jax.Array
    v: jax.Array
    table: jax.Array


class KeyStore(Protocol):
    """Where a layer's keys and values go, and the bag of all keys that its queries may see."""

    key_positions: jax.Array

    def update(self, planes: Planes, new: Planes) -> tuple[Planes, Callable[[], Planes]]:
        """Store `new` [B, T, heads, size] by name -> the updated planes, and what reads the bag [heads, B, S, size]."""
        ...

    def pages(self, planes: Planes) -> Pages | None:
        """Where the bag of the planes `k` and `v` comes from; None without pages."""
        ...


class PagedStore:
    """Writes a step's tokens into their pages, and gathers each request's pages. Made once a step, for all layers."""

    def __init__(
        self,
        positions_plane: jax.Array,
        table: jax.Array,
        start: jax.Array,
        positions: jax.Array,
        in_order: bool = False,
    ) -> None:
        """Find the pages that the step writes.

        Args:
            positions_plane: [pages, page_size].
            table: [B, width] page ids.
            start: [B] tokens that each request has stored so far.
            positions: [B, T] positions of the new tokens; -1 (padding, at the end) is not stored.
            in_order: whether a request's i-th token has position i, as where cp does not split them. A TPU then counts
                in place of looking positions up, which it does slowly, and leaves `positions_plane` as it is.
        """
        pages, page_size = positions_plane.shape
        tokens, width = positions.shape[1], table.shape[1]
        touched = (tokens + page_size - 2) // page_size + 1
        self._table = table
        self._slot = start % page_size
        columns = start[:, None] // page_size + jnp.arange(touched, dtype=jnp.int32)[None, :]
        slots = columns[:, :, None] * page_size + jnp.arange(page_size, dtype=jnp.int32)[None, None, :]
        token = slots - start[:, None, None]
        self._token = jnp.clip(token, 0, tokens - 1)
        new_positions = self._pick(positions)
        self._is_new = (token >= 0) & (token < tokens) & (new_positions >= 0)
        page = jnp.take_along_axis(table, jnp.clip(columns, 0, width - 1), axis=1)
        # A page without a new token is not written at all: an id past the end is dropped by the scatter.
        self._pages = jnp.where(self._is_new.any(axis=2), page, pages)

        def looked_up(plane: jax.Array, written: jax.Array) -> tuple[jax.Array, jax.Array]:
            kept = plane.at[self._pages].get(mode="clip")
            plane = plane.at[self._pages].set(jnp.where(self._is_new, new_positions, kept), mode="drop")
            gathered = plane.at[table].get(mode="clip")
            stored = jnp.where(table[:, :, None] >= 0, gathered, -1)
            return plane, stored.reshape(stored.shape[0], -1)

        def counted(plane: jax.Array, written: jax.Array) -> tuple[jax.Array, jax.Array]:
            place = jnp.arange(width * page_size, dtype=jnp.int32)[None]
            return plane, jnp.where(place < written[:, None], place, -1)

        written = start + (positions >= 0).sum(axis=1, dtype=jnp.int32)
        self.positions_plane, self.key_positions = by_backend(
            positions_plane, written, default=looked_up, tpu=counted if in_order else None
        )

    def _pick(self, x: jax.Array) -> jax.Array:
        """Values of the new tokens [B, T] at every slot of the touched pages [B, touched, page_size]."""
        flat = jnp.take_along_axis(x, self._token.reshape(x.shape[0], -1), axis=1)
        return flat.reshape(self._token.shape)

    def update(self, planes: Planes, new: Planes) -> tuple[Planes, Callable[[], Planes]]:
        """See KeyStore; planes are [1, heads, pages, page_size, size] in the local view."""
        written = self._write({name: plane[0] for name, plane in planes.items()}, new)

        def bag() -> Planes:
            return {name: self._gather(plane) for name, plane in written.items()}

        return {name: plane[None] for name, plane in written.items()}, bag

    def pages(self, planes: Planes) -> Pages:
        """See KeyStore."""
        return Pages(planes["k"][0], planes["v"][0], self._table)

    def _write(self, planes: Planes, new: Planes) -> Planes:
        """Planes [heads, pages, page_size, size] with the new tokens in them."""

        def by_scatter(planes: Planes, new: Planes) -> Planes:
            return {name: self._scatter(plane, new[name]) for name, plane in planes.items()}

        def in_place(planes: Planes, new: Planes) -> Planes:
            written = tpu_write.write(
                [*planes.values()], [new[name][:, 0] for name in planes], self._pages[:, 0], self._slot
            )
            return dict(zip(planes, written, strict=True))

        one_token = next(iter(new.values())).shape[1] == 1
        in_whole_tiles = one_token and tpu_write.fits([*planes.values()])
        return by_backend(planes, new, default=by_scatter, tpu=in_place if in_whole_tiles else None)

    def _scatter(self, plane: jax.Array, new: jax.Array) -> jax.Array:
        lanes, heads = new.shape[0], plane.shape[0]
        picked = jnp.take_along_axis(new, self._token.reshape(lanes, -1, 1, 1), axis=1).transpose(2, 0, 1, 3)
        picked = picked.reshape(heads, *self._token.shape, plane.shape[-1])
        flat, pages = _flat(plane, self._pages)
        # Between barriers: XLA:CPU would read the pages of all layers before the first of them runs, and XLA:GPU fuse
        # the read into the write below, and copy the whole plane for it.
        pages, picked = lax.optimization_barrier((pages, picked))
        kept = lax.optimization_barrier(flat.at[pages].get(mode="clip"))
        merged = jnp.where(self._is_new[None, ..., None], picked, kept)
        return flat.at[pages].set(merged, mode="drop").reshape(plane.shape)

    def _gather(self, plane: jax.Array) -> jax.Array:
        flat, pages = _flat(plane, self._table)
        bag = flat.at[pages].get(mode="clip")
        heads, lanes, width, page_size, size = bag.shape
        return bag.reshape(heads, lanes, width * page_size, size)


def _flat(plane: jax.Array, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A plane as [heads * pages, page_size, size], and ids [...] of its pages as rows of it, [heads, ...].

    With one dimension of rows XLA gathers heads-first as asked; with two it would put them last and transpose.
    An id that is no page becomes a row past the end.
    """
    heads, count, page_size, size = plane.shape
    first = lax.expand_dims(jnp.arange(heads, dtype=jnp.int32) * count, range(1, pages.ndim + 1))
    rows = jnp.where((pages >= 0) & (pages < count), pages, heads * count)[None]
    return plane.reshape(heads * count, page_size, size), first + rows
