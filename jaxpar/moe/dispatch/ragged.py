"""`ragged`: rows go to the ranks that hold their experts and come back, as many as there are, in one exchange each way.

    rank 0's order     | x0 x0 x1 | x1 | x3 |         rank 1 gets     | x1 || x4 x5 x5 || x7 | . . . . . |
                        to 0       to 1  to 2                          of 0   of 1       of 2   never filled

What is sent is what is routed, whatever it is (`jax.lax.ragged_all_to_all`). The price is memory: a rank must have room
for all choices of all tokens, P * R * k rows, or P * R with `moe_deduplicate`, where `all_to_all` holds 1.5 times its
share and comes again. XLA:CPU has no such collective, and moves as many rows as there is room for.
"""

from __future__ import annotations

import jax
import numpy as np

from jaxpar.collectives import ragged_all_to_all
from jaxpar.ledger.traffic import Traffic
from jaxpar.moe.dispatch.messages import counted_and_carried, planned
from jaxpar.moe.dispatch.options import refused_option
from jaxpar.moe.dispatch.routes import routes
from jaxpar.moe.dispatch.sizes import block_rows, iterations
from jaxpar.moe.inputs import BLOCKS, Dispatched, Inputs
from jaxpar.plan import Plan
from jaxpar.strategies import ExpertRows, Step, Strategy


def run(x: Inputs, plan: Plan) -> Dispatched:
    """The rank's tokens through experts of all ranks of `plan.experts` -> [R, D] float32."""
    axes, choices = plan.experts, x.slots.shape[1]
    messages = planned(x, plan)
    room = jax.lax.axis_size(axes) * messages.most
    path = routes(messages.slots, messages.slots_per_rank, axes)
    there, back = path.pieces(axes)
    choice = path.order[:room]
    arrived = tuple(ragged_all_to_all(part, there, room, axes) for part in messages.pack(choice))
    results = messages.work(arrived, path.arrived(room)).astype(x.x.dtype)
    rows = ragged_all_to_all(results, back, len(choice), axes)
    return Dispatched(x.nothing.at[choice // choices].add(rows * messages.weights[choice][:, None]))


def traffic(step: Step) -> list[Traffic]:
    """In each layer an all-to-all of counts and one of offsets; rows each way, with `moe_deduplicate` their choices."""
    plan = step.plan
    if not plan.experts:
        return []
    scope, axes, layers, ranks = ("moe_dispatch", "ragged"), plan.experts, step.moe_layers, step.ranks(plan.experts)
    counted, carried = counted_and_carried(step)
    rows = min(step.moe_rows * step.choices, _room(step))
    found = [
        step.sends(scope, "all_to_all", axes, layers, ranks * counted * 4),
        step.sends(scope, "all_to_all", axes, layers, ranks * 2 * 4),
        step.sends(scope, "ragged_all_to_all", axes, 2 * layers, rows * step.row_bytes),
    ]
    if carried:
        found.append(step.sends(scope, "ragged_all_to_all", axes, layers, rows * 2 * carried * 4))
    return found


def check(step: Step) -> str | None:
    """Any experts, any tokens."""
    return refused_option(step.plan, "ragged")


def expert_rows(step: Step) -> ExpertRows:
    """As many as there is room for; of copies a block of the choices that come with them."""
    if step.plan.moe_deduplicate:
        return ExpertRows(block_rows(step.moe_rows, step.choices), BLOCKS)
    return ExpertRows(_room(step))


def rounds(step: Step, shares: np.ndarray) -> dict[str, int]:
    """Blocks that the choices on the fullest rank take."""
    if not step.plan.moe_deduplicate:
        return {}
    rows, choices = step.moe_rows, step.choices
    return {BLOCKS: iterations(len(shares) * rows * choices * float(shares.max()), block_rows(rows, choices))}


def _room(step: Step) -> int:
    """Rows that may come to a rank."""
    most = step.moe_rows * (1 if step.plan.moe_deduplicate else step.choices)
    return step.ranks(step.plan.experts) * most


STRATEGY = Strategy(
    name="ragged",
    sublayer="moe_dispatch",
    axes=("dp", "ep", "cp", "tp"),
    collectives=("all_to_all", "ragged_all_to_all"),
    needs="memory for all choices",
    run=run,
    traffic=traffic,
    check=check,
    expert_rows=expert_rows,
    rounds=rounds,
)
