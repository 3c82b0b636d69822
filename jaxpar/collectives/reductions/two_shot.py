"""`two_shot`: a reduce-scatter gives each rank one part of the sum, an all-gather brings all parts together: two steps.

                reduce-scatter        all-gather
rank 0: a0 b0    a0 + a1         ->    a b
rank 1: a1 b1    b0 + b1         ->    a b            2 (P-1)/P M sent by each rank, the least that a sum can do with

What a length lacks to a multiple of P is filled up with zeros.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
from jax import lax

from jaxpar.collectives.move import gather_same
from jaxpar.collectives.parts import in_parts, part_size, ranks_of, whole
from jaxpar.collectives.reduce import scatter_sum
from jaxpar.collectives.reduction import Axes, Message, Reduction, all_reduce_only, sublayers_traffic
from jaxpar.ledger.traffic import Traffic
from jaxpar.plan import Plan
from jaxpar.strategies import Step, Strategy


def all_reduce(x: jax.Array, axes: Axes) -> jax.Array:
    """The sum of every rank's `x`, on every rank."""
    if not axes:
        return x
    return whole(gather_same(scatter_sum(in_parts(x, lax.axis_size(axes)), axes), axes), x.shape)


def _messages(elements: int, itemsize: int, sizes: Mapping[str, int]) -> list[Message]:
    ranks = ranks_of(sizes)
    part = part_size(elements, ranks) * itemsize
    return [Message("reduce_scatter", 1, ranks * part), Message("all_gather", 1, part)]


REDUCTION = all_reduce_only("two_shot", all_reduce, _messages)


def run(plan: Plan) -> Reduction:
    """The backend's reduce-scatter, then its all-gather."""
    return REDUCTION


def traffic(step: Step) -> list[Traffic]:
    """The bytes of `psum` in two calls, and those of the filling."""
    return sublayers_traffic(step, REDUCTION)


def check(step: Step) -> str | None:
    """Nothing is asked of the shapes."""
    return None


STRATEGY = Strategy(
    name="two_shot",
    sublayer="all_reduce",
    axes=("cp", "tp"),
    collectives=("reduce_scatter", "all_gather"),
    needs="any shape",
    run=run,
    traffic=traffic,
    check=check,
)
