"""`two_level`: first across nodes, one copy for each node, then inside the node, one copy for each rank.

    node 0 | rank 0  rank 1 |        x0 of rank 0 goes to experts on ranks 1, 2 and 3:
    node 1 | rank 2  rank 3 |
                                     across nodes    rank 0 -> rank 0, rank 0 -> rank 2     to the same local index
                                     inside a node   rank 0 -> rank 1; rank 2 -> rank 2, rank 2 -> rank 3

Links between nodes are several times slower than those inside one. Over them goes one row of a token for each node, not
one for each rank, and one result comes back, summed already (DeepEP's mode for prefill, deepseek-ai/DeepEP). Inside a
node a copy goes to each rank rather than to each expert: it is the same exchange, with what arrived as its tokens, and
sends less. A node is `devices_per_node` consecutive ranks of the mesh; an axis lies across nodes or inside one.
"""

from __future__ import annotations

import math

import jax
import numpy as np

from jaxpar.ledger.scope import nested
from jaxpar.ledger.traffic import Traffic
from jaxpar.moe.dispatch.messages import own_experts, per_rank
from jaxpar.moe.dispatch.options import refused_option
from jaxpar.moe.dispatch.rounds import ROUNDS, in_rounds, rounds_traffic
from jaxpar.moe.dispatch.sizes import (
    block_rows,
    buffer_rows,
    carried_choices,
    even_copies,
    iterations,
    likely_copies,
)
from jaxpar.moe.inputs import BLOCKS, Dispatched, Inputs
from jaxpar.nodes import levels
from jaxpar.plan import Plan
from jaxpar.strategies import ExpertRows, Step, Strategy

NODE_ROUNDS = "node_rounds"
"""What the ledger calls the rounds across nodes; inside each are those of the node."""


def run(x: Inputs, plan: Plan) -> Dispatched:
    """The rank's tokens through experts of all ranks of `plan.experts` -> [R, D] float32."""
    (across, inside, _), (rows, choices) = levels(plan, plan.experts), x.slots.shape
    buffer, inner_buffer = _buffers(plan, rows, choices, x.slots_per_rank)

    through_own = own_experts(x)

    def in_node(arrived: Inputs) -> jax.Array:
        return in_rounds(arrived, per_rank(arrived, x.slots_per_rank, through_own), inside, inner_buffer)

    messages = per_rank(x, plan.mesh.extent(inside) * x.slots_per_rank, in_node if inside else through_own)
    return Dispatched(in_rounds(x, messages, across, buffer, NODE_ROUNDS))


def traffic(step: Step) -> list[Traffic]:
    """What `in_rounds` sends across nodes, and in each of its rounds inside the node."""
    return _sent(step)


def backward(step: Step) -> list[Traffic]:
    """The rows of each round at both levels once more, and their derivatives the other way round."""
    return _sent(step, derivative=True)


def _sent(step: Step, derivative: bool = False) -> list[Traffic]:
    plan, slots = step.plan, step.slots_per_rank
    across, inside, _ = levels(plan, plan.experts)
    if not across:
        return []
    buffers = _buffers(plan, step.moe_rows, step.choices, slots)
    carried = carried_choices(step.choices, plan.mesh.extent(inside) * slots)
    found = rounds_traffic(step, "two_level", across, buffers[0], 1, carried, NODE_ROUNDS, derivative=derivative)
    if inside:
        carried = carried_choices(step.choices, slots)
        found += rounds_traffic(
            step, "two_level", inside, buffers[1], 1, carried, ROUNDS, around=NODE_ROUNDS, derivative=derivative
        )
    return found


def check(step: Step) -> str | None:
    """Experts on more than one node, every axis of theirs across nodes or inside them."""
    plan = step.plan
    where = levels(plan, plan.experts)
    if where.both:
        axis = where.both[-1]
        return (
            f"moe_dispatch='two_level': {axis}={plan.mesh.sizes[axis]} of mesh {plan.mesh} lies partly across nodes of "
            f"{plan.devices_per_node} devices: choose sizes whose products, from tp outwards, divide "
            f"{plan.devices_per_node} or are multiples of it"
        )
    if not where.across:
        over = ",".join(plan.experts_over)
        nodes = f"devices_per_node={plan.devices_per_node}" if plan.devices_per_node else "no devices_per_node"
        return (
            f"moe_dispatch='two_level' needs experts on more than one node, and with {nodes} experts over {over} of "
            f"mesh {plan.mesh} are on one: use all_to_all, or another devices_per_node"
        )
    return refused_option(plan, "two_level")


def expert_rows(step: Step) -> ExpertRows:
    """A block of the choices that come with copies."""
    per = nested(NODE_ROUNDS, ROUNDS) if levels(step.plan, step.plan.experts).inside else NODE_ROUNDS
    return ExpertRows(block_rows(step.moe_rows, step.choices), nested(per, BLOCKS))


def rounds(step: Step, shares: np.ndarray) -> dict[str, int]:
    """Rounds that the fullest node needs, in each those of the fullest rank, and in each of these its blocks."""
    plan, rows, choices, most = step.plan, step.moe_rows, step.choices, float(shares.max())
    across, inside, _ = levels(plan, plan.experts)
    buffer, inner_buffer = _buffers(plan, rows, choices, step.slots_per_rank)
    nodes = step.ranks(across)
    of_nodes = shares.reshape(nodes, step.ranks(inside)).sum(axis=1)
    found = {NODE_ROUNDS: iterations(rows * likely_copies(choices, float(of_nodes.max())), buffer)}
    if inside:
        fullest = nodes * rows * likely_copies(choices, most) / found[NODE_ROUNDS]
        found[ROUNDS] = iterations(fullest, inner_buffer)
    of_round = len(shares) * rows * choices * most / math.prod(found.values())
    return {**found, BLOCKS: iterations(of_round, block_rows(rows, choices))}


def _buffers(plan: Plan, rows: int, choices: int, slots: int) -> tuple[int, int]:
    """Messages of a pair in a round, across nodes and inside one.

    Inside, the tokens are those that all nodes have sent, which go to a rank as often as those of one rank would.
    """
    across, inside, _ = levels(plan, plan.experts)
    nodes, per_node = plan.mesh.extent(across), plan.mesh.extent(inside)
    outer = buffer_rows(rows * even_copies(choices, nodes, per_node * slots), rows)
    return outer, buffer_rows(nodes * rows * even_copies(choices, nodes * per_node, slots), nodes * outer)


STRATEGY = Strategy(
    name="two_level",
    sublayer="moe_dispatch",
    axes=("dp", "ep", "cp", "tp"),
    collectives=("all_to_all", "all_reduce"),
    needs="experts on several nodes, axes across or inside",
    run=run,
    traffic=traffic,
    check=check,
    expert_rows=expert_rows,
    rounds=rounds,
    backward=backward,
)
