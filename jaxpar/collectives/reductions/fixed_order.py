"""`fixed_order`: sums in rank order, and with them products of fixed shapes: a request's bits do not depend on others.

rank 0: p0 -+                 p0 p1 p2 p3   ((p0 + p1) + p2) + p3
rank 1: p1 -+-- all-gather -> p0 p1 p2 p3   the same               twice a layer: after attention, after the FFN
rank 2: p2 -+                 ...

A plan with this sum is `Plan.fixed_order`: wherever rows are multiplied, it is in tiles of one shape (`jaxpar.fixed`),
attention goes tile by tile of fixed sizes, and where the sum would depend on other requests this refuses the plan.
docs/fixed-order.md says what is promised.
"""

from __future__ import annotations

from jaxpar.collectives.fixed_order import FIXED_ORDER
from jaxpar.collectives.reduction import Reduction, sublayers_traffic
from jaxpar.ledger.traffic import Traffic
from jaxpar.plan import Plan
from jaxpar.strategies import Step, Strategy

_INVARIANT = {
    "prefill_attention": ("local", "auto", "ring"),
    "decode_attention": ("local", "auto", "q_replicated", "a2a", "helix"),
    "moe_dispatch": ("local", "auto", "standard"),
}
"""Strategies that merge and add in an order that a request's own tokens say; `auto` takes one of them."""


def run(plan: Plan) -> Reduction:
    """All-gather, all-to-all, and sums in rank order."""
    return FIXED_ORDER


def traffic(step: Step) -> list[Traffic]:
    """Two all-gathers of the residual's [T, D] a layer: each rank sends (P-1) times it, P/2 times what a ring sends."""
    return sublayers_traffic(step, FIXED_ORDER)


def check(step: Step) -> str | None:
    """What would let other requests decide the order in which a request's numbers are added."""
    plan = step.plan
    if step.differentiated:
        return "all_reduce='fixed_order' is for inference: train with all_reduce='psum'"
    for field, able in _INVARIANT.items():
        name = getattr(plan, field)
        is_used = step.moe_layers and plan.experts if field == "moe_dispatch" else plan.sequence
        if is_used and name not in able:
            return (
                f"{field}={name!r} adds in an order that depends on other requests, and all_reduce='fixed_order' "
                f"promises that none does: use {' or '.join(able[1:])}"
            )
    options = {
        "expert_slots": "picks copies of experts by lane",
        "moe_capacity": "drops what other requests leave no room for",
        "chunk_parity": "makes chunks as the longest prompt wants them",
        "collective_matmul": "multiplies as many rows at a time as a slice has",
        "kv_split": "sums scores in the backend's order",
        "two_batch_overlap": "cuts prompts where the lengths of others say",
    }
    for field, why in options.items():
        if (given := getattr(plan, field)) != getattr(Plan, field):
            return f"{field}={given!r} {why}, and all_reduce='fixed_order' promises that none matters: leave it out"
    return None


STRATEGY = Strategy(
    name="fixed_order",
    sublayer="all_reduce",
    axes=("cp", "tp"),
    collectives=("all_gather", "all_to_all"),
    needs="inference",
    run=run,
    traffic=traffic,
    check=check,
)
