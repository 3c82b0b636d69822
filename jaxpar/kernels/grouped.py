"""The grouped matrix product, as each backend computes it best: each row times the weights of its own expert.

    CPU    tiles of one expert each, in a loop (`moe/tiles.py`)
    TPU    megablox (`kernels/tpu_grouped.py`)
    GPU    tiles of one expert each, all at once (`kernels/gpu_grouped.py`)

Both kernels take weights as checkpoints store them, [E, O, I]. What XLA makes of `ragged_dot` copies those of all
experts to [E, I, O] in every step, on GPUs and by older TPU compilers, and on GPUs it multiplies every row by every
expert. It is left for shapes that the kernels do not take.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.kernels import gpu_grouped, tpu_grouped
from jaxpar.kernels.backend import by_backend
from jaxpar.moe.tiles import outer_in_tiles, rows_in_tiles


def product(rows: jax.Array, weights: jax.Array, counts: jax.Array, contracted: int) -> jax.Array:
    """Rows [N, C] times [E, O, I], of which dimension `contracted` is summed over -> float32 [N, W].

    Args:
        rows: sorted by expert; from sum(counts) on they may hold anything.
        weights: of each expert.
        counts: [E] rows of each expert.
        contracted: 2 for what comes of I, 1 for what comes of O.

    Returns:
        W is the other of O and I; 0 for rows from sum(counts) on.
    """
    of_tile = partial(times, contracted=contracted - 1)
    width = weights.shape[3 - contracted]

    def tiled(rows: jax.Array, weights: jax.Array, counts: jax.Array) -> jax.Array:
        return rows_in_tiles(of_tile, rows, weights, counts, width)

    def routed(run: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        return lambda rows, weights, counts: _routed(run(rows, weights, counts, contracted), counts)

    tpu, gpu = (
        routed(kernel.product if kernel.fits(rows, weights, contracted) else _ragged)
        for kernel in (tpu_grouped, gpu_grouped)
    )
    return by_backend(rows, weights, counts, tpu=tpu, gpu=gpu, default=tiled)


def outer(left: jax.Array, right: jax.Array, counts: jax.Array) -> jax.Array:
    """left^T right over the rows of each expert, of [N, O] and [N, I] -> float32 [E, O, I]."""

    def ragged(left: jax.Array, right: jax.Array, counts: jax.Array) -> jax.Array:
        return _ragged_dot(_routed(left, counts), _routed(right, counts), counts, (0, 0), [])

    return by_backend(left, right, counts, tpu=ragged, gpu=ragged, default=outer_in_tiles)


def times(rows: jax.Array, weights: jax.Array, contracted: int = 1) -> jax.Array:
    """[n, I] times [O, I] of one expert -> float32 [n, O]; [I, O] if dimension 0 is `contracted`."""
    return lax.dot_general(rows, weights, (((1,), (contracted,)), ((), ())), preferred_element_type=jnp.float32)


def _ragged(rows: jax.Array, weights: jax.Array, counts: jax.Array, contracted: int) -> jax.Array:
    return _ragged_dot(rows, weights, counts, (1, contracted), [0])


def _ragged_dot(
    rows: jax.Array, other: jax.Array, counts: jax.Array, dims: tuple[int, int], group: list[int]
) -> jax.Array:
    numbers = lax.RaggedDotDimensionNumbers((((dims[0],), (dims[1],)), ((), ())), [0], group)
    return lax.ragged_dot_general(rows, other, counts, numbers, preferred_element_type=jnp.float32)


def _routed(x: jax.Array, counts: jax.Array) -> jax.Array:
    """[N, W] with 0 in rows that have no expert."""
    return jnp.where((jnp.arange(len(x)) < jnp.sum(counts))[:, None], x, jnp.zeros((), x.dtype))
