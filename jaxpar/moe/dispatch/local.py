"""`local`: every expert is on every rank that has tokens for it (experts over one rank), so dispatch sends nothing."""

from __future__ import annotations

from jaxpar.ledger.traffic import Traffic
from jaxpar.moe.inputs import Dispatched, Inputs, weighted_sum
from jaxpar.plan import Plan
from jaxpar.strategies import ExpertRows, Step, Strategy


def run(x: Inputs, plan: Plan) -> Dispatched:
    """The rank's tokens through their experts -> [R, D] float32."""
    return Dispatched(weighted_sum(x))


def traffic(step: Step) -> list[Traffic]:
    """Nothing is sent."""
    return []


def check(step: Step) -> str | None:
    """Experts must not be split."""
    ranks = step.ranks(step.plan.experts)
    if ranks > 1:
        return (
            f"moe_dispatch='local' reaches a rank's own experts only, and they are split over {ranks} ranks: use auto"
        )
    return None


def expert_rows(step: Step) -> ExpertRows:
    """Each choice of each token."""
    return ExpertRows(step.moe_rows * step.choices)


STRATEGY = Strategy(
    name="local",
    sublayer="moe_dispatch",
    axes=(),
    collectives=(),
    needs="experts over one rank",
    run=run,
    traffic=traffic,
    check=check,
    expert_rows=expert_rows,
    backward=traffic,
)
