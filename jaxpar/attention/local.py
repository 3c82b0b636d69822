"""`local`: every key that a query may see is on its own rank (cp = 1), so attention sends nothing.

Heads are split over tp before it and summed by the output projection after it.
"""

from __future__ import annotations

import jax

from jaxpar.attention.inputs import Inputs
from jaxpar.ledger.traffic import Traffic
from jaxpar.plan import Plan
from jaxpar.strategies import Step, Strategy


def run(x: Inputs, plan: Plan, prepared: None) -> jax.Array:
    """Attention over the rank's own bag of keys -> [B, T, H, d] float32."""
    return x.attended()


def traffic(step: Step) -> list[Traffic]:
    """Nothing is sent."""
    return []


def check(step: Step) -> str | None:
    """Keys must not be split over cp."""
    if step.plan.mesh.cp > 1:
        return f"attention 'local' sees the keys of its own rank only, and cp={step.plan.mesh.cp} splits them: use auto"
    return None


PREFILL = Strategy("local", "prefill_attention", (), (), "cp = 1", run, traffic, check)
DECODE = Strategy("local", "decode_attention", (), (), "cp = 1", run, traffic, check)
