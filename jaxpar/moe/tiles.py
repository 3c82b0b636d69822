"""Rows sorted by expert in tiles, each of one expert: how a core multiplies rows by their own experts' weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpar.collectives.types import match_varying

T = TypeVar("T")

TILE_ROWS = (1, 8, 16, 32, 64, 96, 128)
"""Rows of a tile, from that of a token in decode to one whose products take a core as long as those of a plain matrix.

A tile's products read and pack the weights whole, so that an expert is best served in as few tiles as possible.
"""


def tile_sizes(rows: int) -> tuple[int, ...]:
    """The sizes, ascending, of the tiles of `rows` rows: the largest holds all if it can, and others at most half."""
    return (*(size for size in TILE_ROWS[:-1] if 2 * size <= rows), min(rows, TILE_ROWS[-1]))


def computed_rows(counts: Sequence[int] | np.ndarray, rows: int) -> int:
    """How many of `rows` rows, and of padding, the tiles hold together when the experts have `counts` rows."""
    sizes = np.array(tile_sizes(rows))
    whole, rest = np.divmod(np.asarray(counts), sizes[-1])
    return int(whole.sum() * sizes[-1] + sizes[np.searchsorted(sizes, rest[rest > 0])].sum())


class Tile(NamedTuple):
    """Rows of one expert: from `start` [] on as many as `own` [size, 1] is long, of which it says which are meant.

    The others are another expert's, or another tile's, or no expert's, and may hold anything.
    """

    expert: jax.Array
    start: jax.Array
    own: jax.Array

    def rows(self, x: jax.Array) -> jax.Array:
        """This tile of [N, ...]."""
        return lax.dynamic_slice_in_dim(x, self.start, len(self.own), allow_negative_indices=False)

    def put(self, x: jax.Array, values: jax.Array) -> jax.Array:
        """[N, O] with `values` [size, O] in the rows that are meant."""
        values = jnp.where(self.own, values, self.rows(x))
        return lax.dynamic_update_slice_in_dim(x, values, self.start, 0, allow_negative_indices=False)

    def of_expert(self, weights: jax.Array) -> jax.Array:
        """This expert's part of [E, ...]."""
        # The barrier ties the weights to this round of the loop. JAX 0.10 on a CPU has no slices of 16-bit numbers, and
        # would convert the weights of all experts before the loop, however few have a row.
        weights, expert = lax.optimization_barrier((weights, self.expert))
        return lax.dynamic_index_in_dim(weights, expert, keepdims=False, allow_negative_indices=False)


def each_tile(counts: jax.Array, rows: int, visit: Callable[[Tile, T], T], start: T) -> T:
    """`start`, changed by `visit` for tile after tile of `rows` rows, the first sum(counts) of them sorted by expert.

    An expert's tiles are of the largest size, but its last is the smallest that holds the rest; of sizes 1 and 4

        rows     0 0 0 0 0 0 2 3 3 - -
        tiles    [ 4   ]                  expert 0
                         [ 4   ]          expert 0, which owns two of its rows
                             1            expert 2
                               [ 4   ]    expert 3, which owns two

    Neither an expert without rows costs anything nor a row without an expert.
    """
    sizes = tile_sizes(rows)
    tiles = -(-counts // sizes[-1])
    tile_ends, row_ends = jnp.cumsum(tiles), jnp.cumsum(counts)

    def step(index: jax.Array, state: T) -> T:
        expert = jnp.sum(tile_ends <= index)
        end = row_ends[expert]
        first = end - counts[expert] + (index - tile_ends[expert] + tiles[expert]) * sizes[-1]

        def of_size(size: int, state: T) -> T:
            start = jnp.minimum(first, rows - size)
            at = start + jnp.arange(size)[:, None]
            return visit(Tile(expert, start, (at >= first) & (at < end)), state)

        fitting = jnp.sum(jnp.array(sizes[:-1], jnp.int32) < end - first)
        return lax.switch(fitting, [partial(of_size, size) for size in sizes], state)

    with jax.named_scope("loop=tiles"):
        return lax.fori_loop(0, tile_ends[-1], step, start)


def rows_in_tiles(
    of_tile: Callable[[jax.Array, Any], jax.Array], rows: jax.Array, weights: Any, counts: jax.Array, width: int
) -> jax.Array:
    """`of_tile` of rows [n, I] and their expert's part of each of `weights` [E, ...] -> float32 [N, width], else 0."""

    def visit(tile: Tile, out: jax.Array) -> jax.Array:
        return tile.put(out, of_tile(tile.rows(rows), jax.tree.map(tile.of_expert, weights)))

    nothing = jnp.zeros((len(rows), width), jnp.float32)
    return each_tile(counts, len(rows), visit, match_varying(nothing, rows, counts, *jax.tree.leaves(weights)))


def outer_in_tiles(left: jax.Array, right: jax.Array, counts: jax.Array) -> jax.Array:
    """left^T right over the rows of each expert, of [N, O] and [N, I] -> float32 [E, O, I]."""

    def visit(tile: Tile, sums: jax.Array) -> jax.Array:
        # Both, as 0 times what another row may hold is not 0.
        o, i = (jnp.where(tile.own, tile.rows(x), jnp.zeros((), x.dtype)) for x in (left, right))
        more = lax.dot_general(o, i, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        more += lax.dynamic_index_in_dim(sums, tile.expert, keepdims=False, allow_negative_indices=False)
        return lax.dynamic_update_index_in_dim(sums, more, tile.expert, 0, allow_negative_indices=False)

    nothing = jnp.zeros((len(counts), left.shape[1], right.shape[1]), jnp.float32)
    return each_tile(counts, len(left), visit, match_varying(nothing, left, right, counts))


class OwnedTiles(NamedTuple):
    """Tiles of one expert each, of int32 [tiles]: the expert, and from `first` to before `end` the rows that are its.

    Of those that no expert needs `first` is `end`.
    """

    expert: jax.Array
    first: jax.Array
    end: jax.Array


def owned_tiles(counts: jax.Array, rows: int, size: int) -> OwnedTiles:
    """The tiles of `size` of `rows` rows, each expert's first one beginning with its rows; as many as may be needed."""
    experts = len(counts)
    tiles = -(-counts // size)
    tile_ends, row_ends = jnp.cumsum(tiles), jnp.cumsum(counts)
    index = jnp.arange(min(rows, experts) + max(rows - experts, 0) // size, dtype=jnp.int32)
    expert = jnp.searchsorted(tile_ends, index, side="right")
    own = jnp.minimum(expert, experts - 1)
    first = (row_ends - counts)[own] + (index - (tile_ends - tiles)[own]) * size
    end = jnp.minimum(first + size, row_ends[own])
    return OwnedTiles(*(x.astype(jnp.int32) for x in (own, jnp.where(expert < experts, first, end), end)))
