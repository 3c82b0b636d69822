"""The grouped matrix product on TPUs: JAX's megablox kernel (MegaBlocks, arXiv:2211.15841).

A block of rows that several experts share is computed once for each of them. How many blocks are computed is decided by
the rows that have an expert, not by those that there is room for.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

from jaxpar.kernels.typed import of_jax

ROWS = (256, 128, 64, 32, 16)
"""Rows of a block, of which the largest that divides them is taken."""

FEW = 4096
"""Up to so many rows an expert hardly fills 128: a larger block would be computed for little."""

MOST = 1024
"""Columns and summed numbers of a block of weights: with both of that size, two of them take 4 MiB of VMEM."""

LANES = 128


def fits(rows: jax.Array, weights: jax.Array, contracted: int) -> bool:
    """Whether the kernel takes these: rows in whole blocks, sizes in whole vector registers."""
    return not len(rows) % ROWS[-1] and not any(size % LANES for size in weights.shape[1:])


# Traced once for all layers.
@partial(jax.jit, static_argnames=("contracted", "interpret"))
def product(
    rows: jax.Array, weights: jax.Array, counts: jax.Array, contracted: int, interpret: bool = False
) -> jax.Array:
    """As `kernels.grouped.product`, but rows from sum(counts) on hold anything. `interpret`: on any backend."""
    blocks = ROWS if len(rows) > FEW else ROWS[1:]
    summed, width = weights.shape[contracted], weights.shape[3 - contracted]
    tiling = next(block for block in blocks if not len(rows) % block), _block(summed), _block(width)

    def kernel(rows: jax.Array, weights: jax.Array, counts: jax.Array) -> jax.Array:
        return gmm(
            rows, weights, counts.astype(jnp.int32), jnp.float32, tiling,
            transpose_rhs=contracted == 2, interpret=interpret,
        )  # fmt: skip

    return of_jax(kernel, rows, weights, counts)


def _block(size: int) -> int:
    """The largest multiple of LANES up to MOST that divides `size`."""
    return next(block for block in range(min(size, MOST), 0, -LANES) if not size % block)
