"""`tree`: recursive doubling: in log2 P steps each rank swaps its whole sum with a rank twice as far away.

           distance 1            distance 2
rank 0     p0+p1        <---+    p0+p1 + p2+p3
rank 1     p0+p1   <--+     |    p0+p1 + p2+p3        both of a pair add the same two numbers
rank 2     p2+p3      |  <--+    p2+p3 + p0+p1
rank 3     p2+p3   <--+          p2+p3 + p0+p1

Few steps and log2 P times M sent: between `one_shot` and `two_shot` (Thakur et al., 2005). Of P that is no power of two
the ranks beyond the greatest one hand their parts in first and get the sum afterwards, two steps more:

    P = 6:    4 -> 0, 5 -> 1    |    0 1 2 3 double    |    0 -> 4, 1 -> 5

Each step sends, and adds, values rounded to the dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpar.collectives.bounds import rounding
from jaxpar.collectives.parts import ranks_of
from jaxpar.collectives.reduction import Axes, Message, Reduction, all_reduce_only, sublayers_traffic
from jaxpar.collectives.same import assert_same
from jaxpar.collectives.types import require_varying
from jaxpar.ledger.traffic import Traffic
from jaxpar.plan import Plan
from jaxpar.strategies import Step, Strategy


def all_reduce(x: jax.Array, axes: Axes) -> jax.Array:
    """The sum of every rank's `x`, on every rank."""
    if not axes:
        return x
    require_varying("tree", x, axes)
    ranks, rank = lax.axis_size(axes), lax.axis_index(axes)
    doubling, extra = _shape(ranks)
    swaps = [[(i, i ^ 1 << level) for i in range(doubling)] for level in range(doubling.bit_length() - 1)]
    # Ranks to which nothing comes get zeros, and add them.
    fold_in = [[(doubling + i, i) for i in range(extra)]] if extra else []
    for pairs in fold_in + swaps:
        x = _as_sent(x)
        x = (x.astype(jnp.float32) + lax.ppermute(x, axes, pairs).astype(jnp.float32)).astype(x.dtype)
    if extra:
        x = _as_sent(x)
        x = jnp.where(rank < doubling, x, lax.ppermute(x, axes, [(i, doubling + i) for i in range(extra)]))
    return assert_same(x, axes)


def _as_sent(x: jax.Array) -> jax.Array:
    """`x` with its rounding done.

    XLA may otherwise go on with this rank's own value as it was in float32 before it was rounded to 16 bits, and the
    partner has only the rounded one: their sums would differ.
    """
    return lax.optimization_barrier(x)


def _shape(ranks: int) -> tuple[int, int]:
    """(ranks that double, those beyond the greatest power of two)."""
    doubling = 1 << (ranks.bit_length() - 1)
    return doubling, ranks - doubling


def steps(ranks: int) -> int:
    """Messages that follow one another."""
    doubling, extra = _shape(ranks)
    return doubling.bit_length() - 1 + 2 * (extra > 0)


def _messages(elements: int, itemsize: int, sizes: Mapping[str, int]) -> list[Message]:
    doubling, extra = _shape(ranks_of(sizes))
    distances = [1 << level for level in range(doubling.bit_length() - 1)] + [doubling] * (2 if extra else 0)
    return [Message("ppermute", 1, elements * itemsize, distance=distance) for distance in distances]


def error_bound(parts: np.ndarray, dtype: Any) -> np.ndarray:
    """One rounding to `dtype` for each level of the tree: the error grows with log P."""
    return rounding(parts, dtype, steps(len(parts)))


REDUCTION = all_reduce_only("tree", all_reduce, _messages, error_bound)


def run(plan: Plan) -> Reduction:
    """Recursive doubling; the backend's halves."""
    return REDUCTION


def traffic(step: Step) -> list[Traffic]:
    """Log2 P times the residual's [T, D], twice a layer."""
    return sublayers_traffic(step, REDUCTION)


def check(step: Step) -> str | None:
    """Nothing is asked of the shapes."""
    return None


STRATEGY = Strategy(
    name="tree",
    sublayer="all_reduce",
    axes=("cp", "tp"),
    collectives=("ppermute", "all_gather", "reduce_scatter"),
    needs="any shape",
    run=run,
    traffic=traffic,
    check=check,
)
