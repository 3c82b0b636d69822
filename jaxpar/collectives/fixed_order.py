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
from jaxpar.collectives.reduction import NATIVE, Message, Operation, Reduction


def all_sum(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Sum of every rank's `x`, on every rank and of a type that says so."""
    return in_rank_order(gather_same(x[None], axes)).astype(x.dtype) if axes else x


def scatter_sum(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Sum of every rank's `x` [P * R, ...]; rank r keeps rows r * R to (r + 1) * R."""
    if not axes:
        return x
    parts = all_to_all(x, axes, 0, 0).reshape(lax.axis_size(axes), -1, *x.shape[1:])
    return in_rank_order(parts).astype(x.dtype)


def in_rank_order(parts: jax.Array) -> jax.Array:
    """What P ranks have [P, ...], one after the other -> their sum [...] float32."""
    total: jax.Array = reduce(add, parts.astype(jnp.float32))
    return total


def _messages(operation: Operation, rows: int, width: int, itemsize: int, sizes: Mapping[str, int]) -> list[Message]:
    collective = {"all_reduce": "all_gather", "reduce_scatter": "all_to_all", "all_gather": "all_gather"}[operation]
    return [Message(collective, 1, rows * width * itemsize)]


FIXED_ORDER = Reduction("fixed_order", all_sum, scatter_sum, gather_same, _messages)
"""All-gather or all-to-all, and a sum in rank order where the result is wanted."""


def reduction_of(fixed: bool) -> Reduction:
    """How sums are made that no strategy is chosen for: in rank order where the plan fixes it, else by the backend."""
    return FIXED_ORDER if fixed else NATIVE
