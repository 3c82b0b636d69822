"""Collectives that move arrays between ranks without changing a value: gather, all-to-all, and one hop around a ring.

    rank        0    1    2    3
    has         a    b    c    d         all_gather: every rank has a b c d
                                         shift:      d  a  b  c
    has        a0.. b0.. c0.. d0..       all_to_all: rank r has ar br cr dr

`ragged_all_to_all` moves pieces of any sizes, which it puts where their receivers want them:

    rank 0 has  a a a | b         sizes 3 1    rank 0: a a a c . .
    rank 1 has  c | d d d d       sizes 1 4    rank 1: b d d d d .

`groups` restricts one of the others to subgroups of the ranks of a single axis: lists of equally many ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.collectives.types import match_varying, require_varying

Groups = Sequence[Sequence[int]] | None


def all_gather(x: jax.Array, axes: tuple[str, ...], dimension: int = 0, groups: Groups = None) -> jax.Array:
    """Every rank's `x` side by side along `dimension`, on every rank."""
    if not axes or _alone(groups):
        return x
    require_varying("all_gather", x, axes)
    return lax.all_gather(x, axes, axis=dimension, tiled=True, axis_index_groups=groups)


def gather_same(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Every rank's rows `x` one after another, of a type that says that every rank has the same."""
    if not axes:
        return x
    require_varying("gather_same", x, axes)
    return lax.all_gather(x, axes, axis=0, tiled=True, to="invarying")


def all_to_all(x: jax.Array, axes: tuple[str, ...], split: int, concat: int, groups: Groups = None) -> jax.Array:
    """Cut `x` along `split` into a part for each rank; join what arrives, rank by rank, along `concat`."""
    if not axes or _alone(groups):
        return x
    require_varying("all_to_all", x, axes)
    return lax.all_to_all(x, axes, split, concat, axis_index_groups=groups, tiled=True)


class Pieces(NamedTuple):
    """What a ragged all-to-all of P ranks moves, [P] int32 each.

    `starts` and `sizes`, in rows: of the piece for each rank. `targets`: where that rank puts it. `arriving`: rows that
    come from each rank.
    """

    starts: Any
    sizes: Any
    targets: Any
    arriving: Any


def ragged_all_to_all(x: jax.Array, pieces: Pieces, rows: int, axes: tuple[str, ...]) -> jax.Array:
    """The pieces of `x` [N, ...] for each rank of `axes` -> [rows, ...] of what comes, 0 where nothing does."""
    empty = match_varying(jnp.zeros((rows, *x.shape[1:]), x.dtype), x, *pieces)
    return ragged_all_to_all_into(empty, x, pieces, axes, min(len(x), rows))


def ragged_all_to_all_into(
    into: jax.Array, x: jax.Array, pieces: Pieces, axes: tuple[str, ...], largest: int
) -> jax.Array:
    """`into` [M, ...], the pieces of `x` [N, ...] that come for this rank in their places.

    XLA:CPU has no such collective: there every piece is filled up to `largest` rows, the most that one has.
    """
    require_varying("ragged_all_to_all", x, axes)

    def native(x: jax.Array, into: jax.Array, pieces: Pieces) -> jax.Array:
        return lax.ragged_all_to_all(x, into, *pieces, axis_name=axes)

    def filled_up(x: jax.Array, into: jax.Array, pieces: Pieces) -> jax.Array:
        row = jnp.arange(largest)[None, :]
        sent = x[jnp.minimum(pieces.starts[:, None] + row, len(x) - 1)]
        first = lax.all_to_all(pieces.targets, axes, 0, 0, tiled=True)[:, None]
        place = jnp.where(row < pieces.arriving[:, None], first + row, len(into))
        return into.at[place].set(lax.all_to_all(sent, axes, 0, 0, tiled=True), mode="drop")

    moved: jax.Array = lax.platform_dependent(x, into, pieces, cpu=filled_up, default=native)
    return moved


def shift(x: jax.Array, axes: tuple[str, ...], groups: Groups = None, back: bool = False) -> jax.Array:
    """What the previous rank has: one hop around the ring of all ranks, or around the ring of each group.

    `back` is the other way round: what the next rank has.
    """
    if not axes or _alone(groups):
        return x
    require_varying("shift", x, axes)
    rings = [range(lax.axis_size(axes))] if groups is None else groups
    hops = [(ring[i - 1], ring[i]) for ring in rings for i in range(len(ring))]
    return lax.ppermute(x, axes, [(target, source) for source, target in hops] if back else hops)


def pass_on(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """What the previous rank has, zeros on the first: one hop along the chain of all ranks; the last sends nothing."""
    if not axes:
        return x
    require_varying("pass_on", x, axes)
    return lax.ppermute(x, axes, [(rank, rank + 1) for rank in range(lax.axis_size(axes) - 1)])


def _alone(groups: Groups) -> bool:
    return groups is not None and all(len(group) == 1 for group in groups)
