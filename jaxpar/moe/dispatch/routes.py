"""Who sends how many rows to whom: the offsets of every dispatch by all-to-all, in one place.

A rank sorts what it sends by slot. Slots of one rank are neighbours, so what goes to a rank is one piece of the order,
and arrives there sorted by the slots of the receiver:

    rank 0's order    | slot 0 | slot 1 || slot 2 | slot 3 |      send [P, S]     rows for each slot of each rank
                      |<-- to rank 0 -->||<-- to rank 1 -->|      receive [P, S]  rows of each rank for own slots

Bounded buffers take the pieces part by part (`sent`, `received`); a ragged all-to-all takes them whole (`pieces`), and
puts them side by side, rank after rank (`arrived`):

    rank 1 gets       | of 0: slot 2 | slot 3 || of 1: slot 2 | slot 3 |
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.collectives import Pieces, all_to_all
from jaxpar.moe.grouped import sort_by_expert


class Routes(NamedTuple):
    """`order` [N] is what is sent, sorted by slot, what has no slot last; `send` and `receive` [P, S] as above."""

    order: jax.Array
    send: jax.Array
    receive: jax.Array

    @property
    def sizes(self) -> jax.Array:
        """Rows of the piece for each rank [P]."""
        return self.send.sum(axis=1)

    @property
    def starts(self) -> jax.Array:
        """Where in the order the piece for each rank starts [P]."""
        return _starts(self.sizes)

    def sent(self, first: jax.Array | int, count: int) -> tuple[jax.Array, jax.Array]:
        """Rows `first` to `first + count` of the piece for each rank [P, count], and which of them there are."""
        row = first + jnp.arange(count)[None, :]
        place = jnp.minimum(self.starts[:, None] + row, self.order.shape[0] - 1)
        return self.order[place], row < self.sizes[:, None]

    def received(self, first: jax.Array | int, count: int) -> jax.Array:
        """The local slots [P, count] of rows `first` to `first + count` of what each rank sends; S: no row."""
        row = first + jnp.arange(count)[None, :, None]
        return (row >= jnp.cumsum(self.receive, axis=1)[:, None, :]).sum(axis=2, dtype=jnp.int32)

    def pieces(self, axes: tuple[str, ...]) -> tuple[Pieces, Pieces]:
        """The pieces of a ragged all-to-all over the ranks of `axes`, there and back."""
        arriving = self.receive.sum(axis=1)
        # Where they land is up to the receiver: each rank says where it takes what, and where it wants it back.
        here = jnp.stack([_starts(arriving), self.starts], axis=1)
        there = all_to_all(here, axes, 0, 0)
        return (
            Pieces(self.starts, self.sizes, there[:, 0], arriving),
            Pieces(here[:, 0], arriving, there[:, 1], self.sizes),
        )

    def arrived(self, count: int) -> jax.Array:
        """The local slots [count] of all that arrives, rank after rank; S: no row."""
        ranks, slots = self.receive.shape
        piece = jnp.searchsorted(jnp.cumsum(self.receive), jnp.arange(count), side="right")
        return jnp.where(piece < ranks * slots, piece % slots, slots)


def routes(slots: jax.Array, slots_per_rank: int, axes: tuple[str, ...]) -> Routes:
    """The routes of rows for these slots [N] of all ranks of `axes`; any other number is none."""
    ranks = jax.lax.axis_size(axes)
    order, counts = sort_by_expert(slots, ranks * slots_per_rank)
    send = counts.reshape(ranks, slots_per_rank)
    return Routes(order, send, all_to_all(send, axes, 0, 0))


def _starts(sizes: jax.Array) -> jax.Array:
    return jnp.cumsum(sizes) - sizes
