"""`all_to_all`: rows go to the ranks that hold their experts and come back, in rounds of a bounded buffer.

    rank 0: x0 x1 -+                +-> x0 x3 -> experts 0 1 -+                +-> y0 y1
    rank 1: x2 x3 -+-- all-to-all --+-> x2    -> experts 2 3 -+-- all-to-all --+-> y2 y3
    rank 2: x4 x5 -+                +-> x1 .. -> experts 4 5 -+                +-> y4 y5

A row is sent for each choice of a token, or with `moe_deduplicate` once to each rank that has any (`messages.py`). No
row is dropped (`rounds.py`), unless `moe_capacity` bounds what a rank sends to another. Results go back in as many
blocks as `single_batch_overlap` says.
"""

from __future__ import annotations

import numpy as np

from jaxpar.ledger.scope import nested
from jaxpar.ledger.traffic import Traffic
from jaxpar.moe.dispatch.messages import counted_and_carried, planned
from jaxpar.moe.dispatch.options import refused_option
from jaxpar.moe.dispatch.rounds import ROUNDS, in_one_round, in_rounds, rounds_traffic
from jaxpar.moe.dispatch.sizes import (
    SLACK,
    block_rows,
    buffer_rows,
    even_copies,
    iterations,
    likely_copies,
)
from jaxpar.moe.inputs import BLOCKS, Dispatched, Inputs
from jaxpar.overlap import even_parts
from jaxpar.plan import Plan
from jaxpar.strategies import ExpertRows, Step, Strategy


def run(x: Inputs, plan: Plan) -> Dispatched:
    """The rank's tokens through experts of all ranks of `plan.experts` -> [R, D] float32."""
    rows, choices = x.slots.shape
    messages, buffer = planned(x, plan), _buffer(plan, rows, choices, x.slots_per_rank)
    blocks = plan.single_batch_overlap
    if plan.moe_capacity:
        return in_one_round(x, messages, plan.experts, buffer, blocks)
    return Dispatched(in_rounds(x, messages, plan.experts, buffer, blocks=blocks))


def traffic(step: Step) -> list[Traffic]:
    """In each layer an all-to-all of counts and the maximum of rounds; in each round one of rows there, and back."""
    return _sent(step)


def backward(step: Step) -> list[Traffic]:
    """The rows of each round once more, and their derivatives the other way round."""
    return _sent(step, derivative=True)


def _sent(step: Step, derivative: bool = False) -> list[Traffic]:
    plan = step.plan
    if not plan.experts:
        return []
    buffer = _buffer(plan, step.moe_rows, step.choices, step.slots_per_rank)
    counted, carried = counted_and_carried(step)
    per, blocks = _per(plan), plan.single_batch_overlap
    return rounds_traffic(
        step, "all_to_all", plan.experts, buffer, counted, carried, per, blocks=blocks, derivative=derivative
    )


def check(step: Step) -> str | None:
    """Any experts, any tokens."""
    return refused_option(step.plan, "all_to_all")


def expert_rows(step: Step) -> ExpertRows:
    """Of every rank as many rows as the buffer holds; of copies a block of the choices that come with them.

    Where results go back in several blocks, each has a loop of its own over the choices of its copies.
    """
    plan, per = step.plan, _per(step.plan)
    buffer = _buffer(plan, step.moe_rows, step.choices, step.slots_per_rank)
    if plan.moe_deduplicate:
        loops = len(even_parts(buffer, plan.single_batch_overlap))
        of_loop = block_rows(step.moe_rows, step.choices, plan.single_batch_overlap)
        return ExpertRows(loops * of_loop, nested(per, BLOCKS))
    return ExpertRows(step.ranks(plan.experts) * buffer, per)


def rounds(step: Step, shares: np.ndarray) -> dict[str, int]:
    """Rounds that the fullest rank's share of the load needs, and of copies blocks in each."""
    plan, rows, choices, most = step.plan, step.moe_rows, step.choices, float(shares.max())
    fullest = rows * (likely_copies(choices, most) if plan.moe_deduplicate else choices * most)
    buffer = _buffer(plan, rows, choices, step.slots_per_rank)
    found = {} if plan.moe_capacity else {ROUNDS: iterations(fullest, buffer)}
    if plan.moe_deduplicate:
        of_round = len(shares) * rows * choices * most * min(1.0, buffer / fullest)
        loops = len(even_parts(buffer, plan.single_batch_overlap))
        found[BLOCKS] = iterations(of_round / loops, block_rows(rows, choices, plan.single_batch_overlap))
    return found


def _buffer(plan: Plan, rows: int, choices: int, slots: int) -> int:
    """Messages of a pair in a round, of ranks that have `rows` tokens with `choices` each, and `slots` slots."""
    ranks, slack = plan.mesh.extent(plan.experts), plan.moe_capacity or SLACK
    if plan.moe_deduplicate:
        return buffer_rows(rows * even_copies(choices, ranks, slots), rows, slack)
    return buffer_rows(rows * choices / ranks, rows * choices, slack)


def _per(plan: Plan) -> str:
    return "" if plan.moe_capacity else ROUNDS


STRATEGY = Strategy(
    name="all_to_all",
    sublayer="moe_dispatch",
    axes=("dp", "ep", "cp", "tp"),
    collectives=("all_to_all", "all_reduce"),
    needs="any shape",
    run=run,
    traffic=traffic,
    check=check,
    expert_rows=expert_rows,
    rounds=rounds,
    backward=backward,
)
