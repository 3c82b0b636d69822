"""`two_level`: inside each node, then across nodes, then inside again: slow links carry one part of each rank.

node 0 | rank 0: a0 b0   a01 -+-           -> a -+-> a b      inside    reduce-scatter    M
       | rank 1: a1 b1   b01 -|-+-         -> b -+-> a b      across    all-reduce        M / ranks of a node
node 1 | rank 2: a2 b2   a23 -+-|-         -> a -+-> a b      inside    all-gather        M / ranks of a node
       | rank 3: a3 b3   b23 ---+-         -> b -+-> a b

A flat sum over all ranks would send 2 (P-1)/P M, and a slow link would set its pace; here each rank sends about 2 M /
(ranks of a node) over one (Blink, arXiv:1910.04940; NCCL's trees do likewise). Nodes are those of `nodes.levels`: whole
axes lie across or inside, or the ranks of one axis do both, and are then split into groups.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
from jax import lax

from jaxpar.collectives.move import all_gather, gather_same
from jaxpar.collectives.parts import in_parts, part_size, ranks_of, whole
from jaxpar.collectives.reduce import all_sum, scatter_sum, sum_in_groups
from jaxpar.collectives.reduction import Axes, Message, Reduction, all_reduce_only, sublayers_traffic
from jaxpar.collectives.same import assert_same
from jaxpar.ledger.traffic import Traffic
from jaxpar.nodes import levels
from jaxpar.plan import PHASES, Plan
from jaxpar.strategies import Step, Strategy


def run(plan: Plan) -> Reduction:
    """The sum by levels, as `plan.devices_per_node` has them; the backend's halves."""

    def all_reduce(x: jax.Array, axes: Axes) -> jax.Array:
        across, inside, both = levels(plan, axes)
        if both:
            return _in_groups(x, both, plan.devices_per_node)
        if not (across and inside):
            return all_sum(x, axes)
        part = scatter_sum(in_parts(x, lax.axis_size(inside)), inside)
        return whole(gather_same(all_sum(part, across), inside), x.shape)

    def messages(elements: int, itemsize: int, sizes: Mapping[str, int]) -> list[Message]:
        across, inside, both = levels(plan, tuple(sizes))
        size, ranks = elements * itemsize, ranks_of(sizes)
        if not both and not (across and inside):
            return [Message("all_reduce", 1, size, inside=bool(inside))]
        per_node = plan.devices_per_node if both else ranks_of({axis: sizes[axis] for axis in inside})
        part = part_size(elements, per_node)
        of_node = (per_node, inside or None, True)
        first, last = (
            Message("reduce_scatter", 1, per_node * part * itemsize, *of_node),
            Message("all_gather", 1, part * itemsize, *of_node),
        )
        if not both:
            return [first, Message("all_reduce", 1, part * itemsize, axes=across), last]
        nodes = ranks // per_node
        of_nodes = part_size(part, nodes)
        scattered = Message("reduce_scatter", 1, nodes * of_nodes * itemsize, nodes)
        return [first, scattered, Message("all_gather", 1, of_nodes * itemsize, nodes), last]

    return all_reduce_only("two_level", all_reduce, messages)


def _in_groups(x: jax.Array, axes: Axes, per_node: int) -> jax.Array:
    """The sum over one axis whose ranks lie on several nodes, `per_node` on each."""
    ranks = lax.axis_size(axes)
    inside = [list(range(first, first + per_node)) for first in range(0, ranks, per_node)]
    across = [list(range(place, ranks, per_node)) for place in range(per_node)]
    part = scatter_sum(in_parts(x, per_node), axes, groups=inside)
    part = sum_in_groups(part, axes, across, dimension=1)
    return assert_same(whole(all_gather(part, axes, groups=inside), x.shape), axes)


def traffic(step: Step) -> list[Traffic]:
    """Three collectives a sum, four where nodes split an axis."""
    return sublayers_traffic(step, run(step.plan))


def check(step: Step) -> str | None:
    """A sum over several nodes, and no axis that a node cuts unevenly, or beside others."""
    plan = step.plan
    summed = [plan.sublayer(name, phase).sum for phase in PHASES for name in ("attention", "ffn", "moe")]
    for axes in summed:
        where = levels(plan, axes)
        node, sizes = plan.devices_per_node, ", ".join(f"{axis}={plan.mesh.sizes[axis]}" for axis in axes)
        if where.both and len(axes) > 1:
            cut, inner = where.both[0], axes[-1]
            return (
                f"all_reduce='two_level': nodes of {node} devices end inside {cut}={plan.mesh.sizes[cut]}, and a sum "
                f"over {sizes} needs nodes that hold whole axes: use {inner}={node}, or "
                f"devices_per_node={plan.mesh.sizes[inner]}"
            )
        if where.both and plan.mesh.sizes[axes[0]] % node:
            return (
                f"all_reduce='two_level': nodes of {node} devices split the ranks of {sizes} unevenly"
                f": choose sizes whose products, from tp outwards, divide {node} or are its multiples"
            )
    if any(summed) and not any(where.across or where.both for where in (levels(plan, axes) for axes in summed)):
        nodes = f"devices_per_node={plan.devices_per_node}" if plan.devices_per_node else "no devices_per_node"
        return (
            f"all_reduce='two_level' needs a sum over more than one node, and with {nodes} those of mesh {plan.mesh} "
            "stay on one: use psum, or another devices_per_node"
        )
    return None


STRATEGY = Strategy(
    name="two_level",
    sublayer="all_reduce",
    axes=("cp", "tp"),
    collectives=("reduce_scatter", "all_reduce", "all_gather"),
    needs="sums over several nodes",
    run=run,
    traffic=traffic,
    check=check,
)
