"""`psum`: the tensor-parallel sum by the backend's own all-reduce.

rank 0: p0 -+                +-> p0 + p1 + p2 + p3
rank 1: p1 -+-- all-reduce --+-> p0 + p1 + p2 + p3        twice a layer: after attention, after the FFN
rank 2: p2 -+                +-> ...                      (Megatron-LM, arXiv:1909.08053)
rank 3: p3 -+
"""

from __future__ import annotations

from jaxpar.collectives.reduction import NATIVE, Reduction, sublayers_traffic
from jaxpar.ledger.traffic import Traffic
from jaxpar.plan import Plan
from jaxpar.strategies import Step, Strategy


def run(plan: Plan) -> Reduction:
    """The backend's all-reduce, reduce-scatter and all-gather."""
    return NATIVE


def traffic(step: Step) -> list[Traffic]:
    """Two all-reduces of the residual's [T, D] a layer; ring: each rank sends 2(P-1)/P of it."""
    return sublayers_traffic(step, NATIVE)


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
    run=run,
    traffic=traffic,
    check=check,
    backward=backward,
)
