"""`psum`: the tensor-parallel sum by the backend's own all-reduce.

rank 0: p0 -+                +-> p0 + p1 + p2 + p3
rank 1: p1 -+-- all-reduce --+-> p0 + p1 + p2 + p3        twice a layer: after attention, after the FFN
rank 2: p2 -+                +-> ...                      (Megatron-LM, arXiv:1909.08053)
rank 3: p3 -+
"""

from __future__ import annotations

from jaxpar.collectives.exchange import enter_traffic, leave_traffic
from jaxpar.collectives.reduce import all_sum
from jaxpar.ledger.traffic import Traffic
from jaxpar.plan import SublayerName
from jaxpar.strategies import Step, Strategy


def traffic(step: Step) -> list[Traffic]:
    """Two all-reduces of the residual's [T, D] a layer; ring: each rank sends 2(P-1)/P of it.

    Where the residual stream is split over tp, each is an all-gather before and a reduce-scatter after: the same bytes.
    An MoE layer that deals its tokens out gathers the slices.
    """
    rows: list[Traffic] = []
    layers, with_experts = step.config.num_hidden_layers, step.moe_layers
    sublayers: list[tuple[SublayerName, int, int]] = [
        ("attention", layers, step.rows),
        ("ffn", layers - with_experts, step.rows),
        ("moe", with_experts, step.moe_rows),
    ]
    for name, calls, count in sublayers:
        sublayer = step.plan.sublayer(name, step.phase)
        if calls:
            rows += enter_traffic(step, (name, "psum"), sublayer, calls)
            rows += leave_traffic(step, (name, "psum"), sublayer, count, calls)
    return rows


def backward(step: Step) -> list[Traffic]:
    """The gradient of the residual stream is summed where a finished sum joined it, and where gathered slices did."""
    sums = [row for row in traffic(step) if row.collective == "all_reduce"]
    deal = step.plan.sublayer("moe", step.phase).deal
    if deal and step.moe_layers:
        sums.append(step.sends(("moe", "psum"), "all_reduce", deal, step.moe_layers, step.rows * step.row_bytes))
    return sums


def check(step: Step) -> str | None:
    """Nothing is asked of the shapes: any message, any number of ranks."""
    return None


STRATEGY = Strategy(
    name="psum",
    sublayer="all_reduce",
    axes=("cp", "tp"),
    collectives=("all_reduce", "all_gather", "reduce_scatter"),
    needs="any shape",
    run=all_sum,
    traffic=traffic,
    check=check,
    backward=backward,
)
