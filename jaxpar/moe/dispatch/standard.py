"""`standard`: every rank gets the tokens of all, runs them through its own experts, and the results are summed.

    rank 0: x0 -+                +-> x0 x1 x2 x3 -> experts 0 1 -+                      +-> y0
    rank 1: x1 -+-- all-gather --+-> x0 x1 x2 x3 -> experts 2 3 -+-- reduce-scatter ----+-> y1
    rank 2: x2 -+                +-> x0 x1 x2 x3 -> experts 4 5 -+                      +-> y2
    rank 3: x3 -+                +-> x0 x1 x2 x3 -> experts 6 7 -+                      +-> y3

What is sent does not depend on the routing: of few ranks, or few tokens, less than an all-to-all (the all-gather and
reduce-scatter of SGLang's attention data parallelism). Where most rows are padding, the real ones of all ranks are put
side by side in less `room`, by an all-reduce, and so are their results (engine/room.py):

    rank 0: x0 . . -+                                                                    +-> y0 . .
    rank 1: x1 x2 . +-- all-reduce --> x0 x1 x2 . -> experts 2 3 -- all-reduce --> y ... +-> y1 y2 .
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpar.collectives import all_gather, all_sum, rank_index
from jaxpar.collectives.fixed_order import reduction_of
from jaxpar.collectives.reduction import Call, Reduction
from jaxpar.ledger.traffic import Traffic
from jaxpar.moe.dispatch.options import refused_option
from jaxpar.moe.inputs import Dispatched, Inputs, local_choices, pack_routing, unpack_routing, weighted_sum
from jaxpar.plan import Plan
from jaxpar.strategies import ExpertRows, Step, Strategy


def run(x: Inputs, plan: Plan) -> Dispatched:
    """The rank's tokens through experts of all ranks of `plan.experts` -> [R, D]."""
    axes = plan.experts
    if x.room:
        return _side_by_side(x, axes, reduction_of(plan.fixed_order))
    routing = unpack_routing(all_gather(pack_routing(x.slots, x.weights), axes))
    slots, weights = local_choices(*routing, rank_index(axes) * x.slots_per_rank, x.slots_per_rank)
    part = weighted_sum(x._replace(x=all_gather(x.x, axes), slots=slots, weights=weights))
    return Dispatched(reduction_of(plan.fixed_order).reduce_scatter(part.astype(x.x.dtype), axes))


def _side_by_side(x: Inputs, axes: tuple[str, ...], reduction: Reduction) -> Dispatched:
    """The real rows of all ranks in `x.room` rows, which hold them all."""
    none = jax.lax.axis_size(axes) * x.slots_per_rank
    real = (x.slots < none).any(axis=1)
    counts = all_gather(real.sum(dtype=jnp.int32)[None], axes)
    before = jnp.where(jnp.arange(len(counts)) < rank_index(axes), counts, 0).sum()
    place = jnp.where(real, before + jnp.cumsum(real) - 1, x.room)

    def of_all(rows: jax.Array) -> jax.Array:
        return all_sum(jnp.zeros((x.room, rows.shape[1]), rows.dtype).at[place].set(rows, mode="drop"), axes)

    # Counted from `none`, the zeros of rows without a token are no choice.
    slots, weights = unpack_routing(of_all(pack_routing(x.slots - none, x.weights)))
    slots, weights = local_choices(slots + none, weights, rank_index(axes) * x.slots_per_rank, x.slots_per_rank)
    part = weighted_sum(x._replace(x=of_all(x.x), slots=slots, weights=weights))
    sums = reduction.all_reduce(part.astype(x.x.dtype), axes)
    return Dispatched(sums.at[place].get(mode="fill", fill_value=0))


def traffic(step: Step) -> list[Traffic]:
    """In each layer an all-gather of rows and one of routing, a reduce-scatter of as many rows as were gathered.

    With `room` all-reduces of it in their place, and an all-gather of counts.
    """
    if not step.plan.experts:
        return []
    scope, axes, layers = ("moe_dispatch", "standard"), step.plan.experts, step.moe_layers
    reduction = reduction_of(step.plan.fixed_order)
    if step.room:
        return [
            step.sends(scope, "all_gather", axes, layers, 4),
            step.sends(scope, "all_reduce", axes, layers, step.room * 2 * step.choices * 4),
            step.sends(scope, "all_reduce", axes, layers, step.room * step.row_bytes),
            *reduction.sent(step, scope, Call("all_reduce", axes, layers, step.room)),
        ]
    rows = step.moe_rows * step.row_bytes
    return [
        step.sends(scope, "all_gather", axes, layers, step.moe_rows * 2 * step.choices * 4),
        step.sends(scope, "all_gather", axes, layers, rows),
        *reduction.sent(step, scope, Call("reduce_scatter", axes, layers, step.moe_rows * step.ranks(axes))),
    ]


def backward(step: Step) -> list[Traffic]:
    """A gather's derivative is a reduce-scatter of what was gathered, and a reduce-scatter's a gather."""
    if not step.plan.experts:
        return []
    scope, axes, layers = ("moe_dispatch", "standard"), step.plan.experts, step.moe_layers
    rows, ranks = step.moe_rows, step.ranks(axes)
    return [
        step.sends(scope, "all_gather", axes, layers, rows * step.row_bytes),
        step.sends(scope, "reduce_scatter", axes, layers, ranks * rows * step.row_bytes),
        step.sends(scope, "reduce_scatter", axes, layers, ranks * rows * 2 * step.choices * 4),
    ]


def check(step: Step) -> str | None:
    """Any experts, any tokens."""
    return refused_option(step.plan, "standard")


def expert_rows(step: Step) -> ExpertRows:
    """Each choice of each token of all ranks: all may be for this one."""
    return ExpertRows(step.choices * (step.room or step.moe_rows * step.ranks(step.plan.experts)))


STRATEGY = Strategy(
    name="standard",
    sublayer="moe_dispatch",
    axes=("dp", "ep", "cp", "tp"),
    collectives=("all_gather", "reduce_scatter", "all_reduce", "all_to_all"),
    needs="any shape",
    run=run,
    traffic=traffic,
    check=check,
    expert_rows=expert_rows,
    backward=backward,
)
