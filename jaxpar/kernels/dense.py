"""Rows times a weight, or a slice of one that only the rank's index tells, as each backend computes it best.

    rows      [T, I] x [O, I], of which rows start .. start + count       queries, gate and up of an FFN
    columns   [T, count] x [O, I], of which as many columns from start    output projections, down

Decode over cp computes a share of the heads, and under `helix` of an FFN's width, of weights that prefill needs whole.
XLA copies such a slice before it multiplies, on CPUs and on GPUs: read, written, and read again in every step, which
is little but the reading. XLA:TPU reads it where it lies, and so does the kernel for GPUs (`kernels/gpu_sliced.py`).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.fixed import by_row, product_rows
from jaxpar.kernels import gpu_sliced
from jaxpar.kernels.backend import by_backend


def matmul(x: jax.Array, w: jax.Array, fixed: bool = False) -> jax.Array:
    """[T, I] times a weight [O, I] as checkpoints store it -> [T, O] in float32; `fixed` as in `jaxpar.fixed`."""

    def product(x: jax.Array) -> jax.Array:
        rows = x.shape[0]
        x = jnp.broadcast_to(x, (product_rows(rows, x.dtype.itemsize), x.shape[1]))
        return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)[:rows]

    return by_row(product, x, fixed=fixed)


def matmul_slice(
    x: jax.Array, w: jax.Array, start: jax.Array | int, count: int, axis: int, unit: int, fixed: bool = False
) -> jax.Array:
    """[T, I] or [T, count] times a slice of a weight [O, I] -> [T, count] or [T, O] in float32.

    Args:
        x: rows.
        w: the whole weight.
        start: where the slice begins.
        count: how long it is.
        axis: 0 for a slice of the rows of `w`, 1 for one of its columns.
        unit: divides the start on every rank, which tells a GPU how memory is aligned.
        fixed: as in `jaxpar.fixed`.
    """

    def copied(x: jax.Array, w: jax.Array, start: jax.Array) -> jax.Array:
        return matmul(x, lax.dynamic_slice_in_dim(w, start, count, axis), fixed)

    kernel = partial(gpu_sliced.product, count=count, axis=axis, unit=unit)
    gpu = kernel if not fixed and gpu_sliced.fits(x, w, count, axis) else None
    return by_backend(x, w, jnp.asarray(start), gpu=gpu, default=copied)
