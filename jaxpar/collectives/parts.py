"""An array of any shape as one part for each of P ranks, and back: how reductions take arrays that P does not divide.

x of 10 values, P = 4:    [0 1 2]  [3 4 5]  [6 7 8]  [9 . .]       "." is a zero that fills up
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp


def part_size(elements: int, ranks: int) -> int:
    """Values of a part."""
    return -(-elements // ranks)


def in_parts(x: jax.Array, ranks: int) -> jax.Array:
    """`x` of any shape -> [P, values of a part], filled up with zeros."""
    size = part_size(x.size, ranks)
    return jnp.pad(x.reshape(-1), (0, size * ranks - x.size)).reshape(ranks, size)


def whole(parts: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """[P, values of a part] -> the array of `shape` that was cut into them."""
    return parts.reshape(-1)[: math.prod(shape)].reshape(shape)


def ranks_of(sizes: Mapping[str, int]) -> int:
    """Ranks of axes of these sizes."""
    return math.prod(sizes.values())
