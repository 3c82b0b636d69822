"""A kernel for GPUs by Pallas and Triton, which compiles without a device for every generation since Ampere.

JAX's other way to write one, Mosaic GPU, has instructions of one generation each (Hopper's are not Blackwell's).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxpar.kernels.typed import typed_like

Ref = Any
"""A reference of Pallas to an array, which has no public type."""

LEAST = 16
"""Rows, columns and summed numbers that a tensor core takes at least."""


def triton_call(
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    shapes: Sequence[tuple[int, ...]],
    like: jax.Array,
    flops: int,
    bytes_accessed: int,
    warps: int,
    interpret: bool,
) -> Callable[..., list[jax.Array]]:
    """The kernel as a function of arrays, all of which it sees whole.

    Args:
        kernel: of references to the arguments and to the results.
        grid: how many of it run, at once or in turn.
        shapes: of the results, which are float32.
        like: an argument that varies over the mesh axes over which the results do.
        flops: what the ledger counts for it, and what a compiled program says of it.
        bytes_accessed: of the device's memory.
        warps: of 32 threads, for each of the grid.
        interpret: as XLA operations, on any backend.
    """
    call: Callable[..., list[jax.Array]] = pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=[typed_like(like, shape) for shape in shapes],
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=3),
        cost_estimate=pl.CostEstimate(flops=flops, transcendentals=0, bytes_accessed=bytes_accessed),
        # The estimate is not kept for a GPU.
        metadata={"flops": str(flops)},
        interpret=interpret,
    )
    return call


def dot(left: jax.Array, right: jax.Array) -> jax.Array:
    """[n, k] times [k, m] in float32; float32 is multiplied as such, and not in fewer bits."""
    precision = lax.Precision.HIGHEST if left.dtype == "float32" else None
    return lax.dot_general(left, right, (((1,), (0,)), ((), ())), precision, preferred_element_type="float32")


def largest_block(size: int, most: int) -> int:
    """The largest power of 2 up to `most` that divides `size`."""
    return min(most, size & -size)


def fitting_block(length: int, most: int) -> int:
    """The smallest power of 2 that holds `length`, from LEAST to `most`."""
    return min(most, max(LEAST, pl.next_power_of_2(length)))
