"""`send_recv`: what a stage has done goes to the next one, in every tick.

    tick t     stage 0: item 2     stage 1: item 1     stage 2: item 0
                      |                  |                  +-> head, sampling
                      +--- [R, D] -----+ +--- [R, D] -----+
                                       |                  |
    tick t+1   stage 0: item 3     stage 1: item 2     stage 2: item 1
                      ^ embedding

Every rank passes on the residual rows that it holds, and no others: over pp, B * D numbers at each boundary (GPipe,
arXiv:1811.06965). Stage 0 takes embedded tokens in their place. No condition stands around the hop: a stage without an
item runs, and sends, rows of padding.
"""

from __future__ import annotations

import jax

from jaxpar.collectives import pass_on
from jaxpar.ledger.traffic import Traffic
from jaxpar.plan import Plan
from jaxpar.strategies import Step, Strategy


def run(rows: jax.Array, plan: Plan) -> jax.Array:
    """The residual rows [R, D] that a stage has finished -> those of the stage before; zeros on stage 0."""
    with jax.named_scope("pipeline:send_recv"):
        return pass_on(rows, plan.pipeline)


def traffic(step: Step) -> list[Traffic]:
    """One hop of the rows that a rank holds, in every tick."""
    if not step.plan.pipeline:
        return []
    return [step.sends(("pipeline", "send_recv"), "ppermute", step.plan.pipeline, 1, step.passed_rows * step.row_bytes)]


def check(step: Step) -> str | None:
    """Any rows."""
    return None


STRATEGY = Strategy("send_recv", "pipeline", ("pp",), ("ppermute",), "any rows", run, traffic, check)
