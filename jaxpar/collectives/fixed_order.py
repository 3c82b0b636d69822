"""Sums over ranks whose order is fixed: partial results are moved as they are, and added one rank after the other.

    rank 0: p0 -+                 p0 p1 p2 p3      ((p0 + p1) + p2) + p3
    rank 1: p1 -+-- all-gather -> p0 p1 p2 p3      the same, in float32, rounded once
    rank 2: p2 -+                 ...
    rank 3: p3 -+

A backend's own sum may take its order from the size of the message, or from where in it a number stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import add

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.collectives.move import all_to_all, gather_same
from jaxpar.collectives.reduction import Message, Operation, Reduction


def all_sum(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Sum of every rank's `x` [R, ...], on every rank and of a type that says so."""
    return _in_rank_order(gather_same(x, axes), axes)


def scatter_sum(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Sum of every rank's `x` [P * R, ...]; rank r keeps rows r * R to (r + 1) * R."""
    return _in_rank_order(all_to_all(x, axes, 0, 0), axes)


def _in_rank_order(parts: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Rows [P * R, ...] of P ranks, one after the other -> their sum [R, ...]."""
    if not axes:
        return parts
    by_rank = jnp.split(parts.astype(jnp.float32), lax.axis_size(axes))
    return reduce(add, by_rank).astype(parts.dtype)


def _messages(operation: Operation, rows: int, width: int, itemsize: int, sizes: Mapping[str, int]) -> list[Message]:
    collective = {"all_reduce": "all_gather", "reduce_scatter": "all_to_all", "all_gather": "all_gather"}[operation]
    return [Message(collective, 1, rows * width * itemsize)]


FIXED_ORDER = Reduction("fixed_order", all_sum, scatter_sum, gather_same, _messages)
"""All-gather or all-to-all, and a sum in rank order where the result is wanted."""
