"""Collectives that move arrays between ranks without changing a value: gather, all-to-all, and one hop around a ring.

    rank        0    1    2    3
    has         a    b    c    d         all_gather: every rank has a b c d
                                         shift:      d  a  b  c
    has        a0.. b0.. c0.. d0..       all_to_all: rank r has ar br cr dr

`groups` restricts one of them to subgroups of the ranks of a single axis: lists of equally many ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import lax

from jaxpar.collectives.types import require_varying

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


def shift(x: jax.Array, axes: tuple[str, ...], groups: Groups = None) -> jax.Array:
    """What the previous rank has: one hop around the ring of all ranks, or around the ring of each group."""
    if not axes or _alone(groups):
        return x
    require_varying("shift", x, axes)
    rings = [range(lax.axis_size(axes))] if groups is None else groups
    return lax.ppermute(x, axes, [(ring[i - 1], ring[i]) for ring in rings for i in range(len(ring))])


def _alone(groups: Groups) -> bool:
    return groups is not None and all(len(group) == 1 for group in groups)
