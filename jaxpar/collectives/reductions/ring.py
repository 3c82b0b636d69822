"""`ring`: reduce-scatter and all-gather as 2 (P-1) explicit hops to the next rank, which XLA sees one by one.

        reduce-scatter, P-1 hops                 all-gather, P-1 hops
rank 0 -> rank 1 -> rank 2 -> rank 3       rank 0 -> rank 1 -> rank 2 -> rank 3        1/P of M a hop
   ^                             |            ^                             |
   +-----------------------------+            +-----------------------------+

The bytes of `psum`, and the most steps: where bandwidth rules, and each rank has a fast link to its neighbours alone
(Patarasuk and Yuan, 2009). Its halves are rings as well. A partial sum is rounded to the dtype at every hop.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
from jax import lax

from jaxpar.collectives.parts import in_parts, part_size, ranks_of, whole
from jaxpar.collectives.reduction import Axes, Message, Operation, Reduction, sublayers_traffic
from jaxpar.collectives.rings import ring_all_gather, ring_reduce_scatter
from jaxpar.collectives.same import assert_same
from jaxpar.ledger.traffic import Traffic
from jaxpar.plan import Plan
from jaxpar.strategies import Step, Strategy


def all_reduce(x: jax.Array, axes: Axes) -> jax.Array:
    """The sum of every rank's `x`, on every rank."""
    if not axes:
        return x
    part = ring_reduce_scatter(in_parts(x, lax.axis_size(axes)), axes)
    return whole(assert_same(ring_all_gather(part, axes), axes), x.shape)


def reduce_scatter(x: jax.Array, axes: Axes) -> jax.Array:
    """[P * R, D] on each rank -> rank r: rows r * R to (r + 1) * R of the sum."""
    if not axes:
        return x
    ranks = lax.axis_size(axes)
    return ring_reduce_scatter(x.reshape(ranks, -1, *x.shape[1:]), axes)


def all_gather(x: jax.Array, axes: Axes) -> jax.Array:
    """[R, D] on each rank -> [P * R, D] on every rank."""
    if not axes:
        return x
    return assert_same(ring_all_gather(x, axes), axes).reshape(-1, *x.shape[1:])


def _messages(operation: Operation, rows: int, width: int, itemsize: int, sizes: Mapping[str, int]) -> list[Message]:
    ranks, elements = ranks_of(sizes), rows * width
    halves = 2 if operation == "all_reduce" else 1
    part = elements if operation == "all_gather" else part_size(elements, ranks)
    return [Message("ppermute", halves * (ranks - 1), part * itemsize)]


REDUCTION = Reduction("ring", all_reduce, reduce_scatter, all_gather, _messages)


def run(plan: Plan) -> Reduction:
    """Hops to the next rank, for the sum and for its halves."""
    return REDUCTION


def traffic(step: Step) -> list[Traffic]:
    """2 (P-1) hops a sum, P-1 a half."""
    return sublayers_traffic(step, REDUCTION)


def check(step: Step) -> str | None:
    """Nothing is asked of the shapes."""
    return None


STRATEGY = Strategy(
    name="ring",
    sublayer="all_reduce",
    axes=("cp", "tp"),
    collectives=("ppermute",),
    needs="any shape",
    run=run,
    traffic=traffic,
    check=check,
)
