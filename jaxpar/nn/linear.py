"""Column- and row-parallel projections and the RMS norm, on a rank's slice of the weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxpar.collectives import rank_index
from jaxpar.collectives.matmul import gather_matmul, matmul_scatter
from jaxpar.fixed import by_row
from jaxpar.kernels.dense import matmul, matmul_slice
from jaxpar.nn.weights import Weight


class Ring(NamedTuple):
    """The axes around which tokens go while they are multiplied (`collectives/matmul.py`), and whose product it is."""

    axes: tuple[str, ...]
    sublayer: str


NO_RING = Ring((), "")
"""A product that has all its tokens, and keeps its result."""


@dataclass(frozen=True)
class Share:
    """A rank's share of rows that ranks of some axes deal among them: `count` from `start` on.

    Where the rows do not divide, the last shares begin earlier so as not to end beyond them: their first `skip` rows
    belong to the ranks before. `unit` divides the start of every rank.
    """

    count: int
    start: jax.Array | int
    skip: jax.Array | int
    unit: int

    def scaled(self, size: int) -> Share:
        """The same where each row is `size` rows."""
        return Share(self.count * size, self.start * size, self.skip * size, self.unit * size)

    def offset_by(self, rows: int) -> Share:
        """The same where `rows` others come first."""
        return replace(self, start=self.start + rows, unit=math.gcd(self.unit, rows))


def share_of(total: int, axes: tuple[str, ...]) -> Share:
    """This rank's share of `total` rows over `axes`."""
    count = -(-total // lax.axis_size(axes))
    first = rank_index(axes) * count
    start = jnp.minimum(first, total - count)
    return Share(count, start, first - start, math.gcd(count, total - count))


class ColumnParallel(nnx.Module):
    """[T, I] -> [T, O/tp]: each rank holds rows of the weight. Input is the same on all ranks; nothing is sent.

    The result stays in float32: what follows is elementwise, and rounds once.
    """

    def __init__(self, weight: Weight, bias: Weight | None, fixed: bool = False) -> None:
        """Slot weights: `weight` [1, O/tp, I], `bias` [1, O/tp] in the local view; `fixed` as in `matmul`."""
        self.weight, self.bias, self.fixed = weight, bias, fixed

    def __call__(self, x: jax.Array, ring: Ring = NO_RING) -> jax.Array:
        """Project; the bias is split like the rows.

        Over `ring` the input is a slice of the tokens, and those of the other slices come as it goes: [P * T, O/tp].
        """
        y = gather_matmul(x, ring.axes, lambda rows: matmul(rows, self.weight[0], self.fixed), ring.sublayer)
        return y if self.bias is None else y + self.bias[0].astype(y.dtype)[None, :]

    def rows(self, x: jax.Array, share: Share) -> jax.Array:
        """Project onto a share of the rank's rows alone -> [T, count]."""
        y = matmul_slice(x, self.weight[0], share.start, share.count, 0, share.unit, self.fixed)
        if self.bias is None:
            return y
        return y + lax.dynamic_slice_in_dim(self.bias[0], share.start, share.count).astype(y.dtype)[None, :]

    def last_rows(self, x: jax.Array, count: int) -> jax.Array:
        """Project onto the last `count` of the rank's rows -> [T, count]."""
        y = matmul(x, self.weight[0][-count:], self.fixed)
        return y if self.bias is None else y + self.bias[0][-count:].astype(y.dtype)[None, :]


class RowParallel(nnx.Module):
    """[T, I/tp] -> a partial sum of [T, O]: each rank holds columns of the weight.

    The caller sums over the ranks, then adds the bias once with `add_bias`.
    """

    def __init__(self, weight: Weight, bias: Weight | None, fixed: bool = False) -> None:
        """Slot weights: `weight` [1, O, I/tp], `bias` [1, O] in the local view; `fixed` as in `matmul`."""
        self.weight, self.bias, self.fixed = weight, bias, fixed

    def __call__(self, x: jax.Array, ring: Ring = NO_RING) -> jax.Array:
        """The rank's partial result, in the dtype in which it is sent.

        Over `ring` it is summed as it goes, and a slice of the tokens is left: [ceil(T / P), O].
        """
        return matmul_scatter(x, ring.axes, lambda rows: matmul(rows, self.weight[0], self.fixed), ring.sublayer)

    def columns(self, x: jax.Array, share: Share) -> jax.Array:
        """The same of [T, count]: the part of the input that belongs to a share of the rank's columns."""
        y = matmul_slice(x, self.weight[0], share.start, share.count, 1, share.unit, self.fixed)
        return y.astype(x.dtype)

    def add_bias(self, y: jax.Array) -> jax.Array:
        """Add the bias to the finished sum."""
        return y if self.bias is None else y + self.bias[0][None, :]


def rms_norm(
    x: jax.Array, scale: jax.Array, eps: float, fixed: bool = False, mean_square: jax.Array | None = None
) -> jax.Array:
    """Root-mean-square norm over the last dimension, statistics in float32 (arXiv:1910.07467).

    `fixed` as in `jaxpar.fixed`; `mean_square` [..., 1] is given where `x` is a slice of what the norm goes over.
    """

    def norm(x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        mean = jnp.mean(wide * wide, axis=-1, keepdims=True) if mean_square is None else mean_square
        wide = wide * lax.rsqrt(mean + eps)
        return (wide * lax.expand_dims(scale.astype(jnp.float32), range(x.ndim - 1))).astype(x.dtype)

    return by_row(norm, x, fixed=fixed)
