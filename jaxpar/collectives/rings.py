"""All-gather, reduce-scatter and all-to-all written as hops of a ring, so that work can stand between the hops.

Each takes or gives a leading dimension of P parts, one for each rank, and hops P - 1 times. Of four ranks:

    reduce-scatter: a part goes once around, and every rank adds its own to it; it arrives complete at its owner.
        hop        0         1         2
        rank 0     3 of 0    2 of 3,0  1 of 2,3,0      "2 of 3,0": part 2, what ranks 3 and 0 have of it, is sent on

    all-gather: whole parts go around, and every rank keeps a copy.
        rank 0     a         d         c               rank 0 sends its own, then what has come

    all-to-all: the part for the rank t places on goes there at once, in hop t.
        rank 0     to 1      to 2      to 3

The first two talk to neighbours alone: what a torus likes. They are `lax.scan`s, whose hops XLA overlaps with what else
their bodies do.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.collectives.move import shift
from jaxpar.collectives.types import bits_of, match_varying, require_varying


def ring_reduce_scatter(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """[P, ...] on each rank -> rank r: part r [...] of their sum, added in float32, one hop after another.

    What a hop carries has the dtype of `x`, so that each addition is rounded to it.
    """
    if not axes:
        return x[0]
    require_varying("ring_reduce_scatter", x, axes)
    rank, ranks = lax.axis_index(axes), lax.axis_size(axes)

    def own(hop: jax.Array | int) -> jax.Array:
        return lax.dynamic_index_in_dim(x, (rank - 1 - hop) % ranks, keepdims=False)

    def step(part: jax.Array, hop: jax.Array) -> tuple[jax.Array, None]:
        came = shift(part, axes)
        return (came.astype(jnp.float32) + own(hop).astype(jnp.float32)).astype(x.dtype), None

    part, _ = lax.scan(step, own(0), jnp.arange(1, ranks))
    return part


def ring_all_gather(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """[...] on each rank -> [P, ...], the parts of all ranks in their order; every rank holds the same bits.

    Floats travel as integers of their bits. Of a rank's own part, which has just been rounded to 16 bits, XLA would
    otherwise be free to use the value before rounding, and its neighbours have only the rounded one.
    """
    if not axes:
        return x[None]
    require_varying("ring_all_gather", x, axes)
    rank, ranks = lax.axis_index(axes), lax.axis_size(axes)
    own = bits_of(x)

    def step(carry: tuple[jax.Array, jax.Array], hop: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        part, parts = carry
        part = shift(part, axes)
        return (part, lax.dynamic_update_index_in_dim(parts, part, (rank - hop) % ranks, 0)), None

    parts = match_varying(jnp.zeros((ranks, *x.shape), own.dtype), own)
    parts = lax.dynamic_update_index_in_dim(parts, own, rank, 0)
    (_, parts), _ = lax.scan(step, (own, parts), jnp.arange(1, ranks))
    return parts if own.dtype == x.dtype else lax.bitcast_convert_type(parts, x.dtype)


def ring_all_to_all(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """[P, ...], a part for each rank -> [P, ...], the parts that all ranks had for this one, in their order."""
    if not axes:
        return x
    require_varying("ring_all_to_all", x, axes)
    rank, ranks = lax.axis_index(axes), lax.axis_size(axes)
    parts = x
    for hop in range(1, ranks):
        sent = lax.dynamic_index_in_dim(x, (rank + hop) % ranks, keepdims=False)
        came = lax.ppermute(sent, axes, [(source, (source + hop) % ranks) for source in range(ranks)])
        parts = lax.dynamic_update_index_in_dim(parts, came, (rank - hop) % ranks, 0)
    return parts
