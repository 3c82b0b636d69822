"""`q_replicated`: every rank of cp projects all query heads, so that none are gathered; otherwise as `a2a`.

    project    rank c: all query heads                           cp times the work of `a2a`, nothing sent
    attend     rank c: all heads over its own keys
    exchange   rank c: the c-th slice of the heads, merged       all-to-all over cp

Weights are replicated over cp in any case; a decode step reads the whole query projection where `a2a` reads a slice.
"""

from __future__ import annotations

import jax

from jaxpar.attention.decode.exchange import exchange, exchange_traffic
from jaxpar.attention.inputs import Inputs
from jaxpar.ledger.traffic import Traffic
from jaxpar.plan import Plan
from jaxpar.strategies import Step, Strategy


def run(x: Inputs, plan: Plan, prepared: None) -> jax.Array:
    """All query heads [B, T, H, d] -> attention of a slice [B, T, H/cp, d] of them over the keys of all ranks."""
    return exchange(x, plan)


def traffic(step: Step) -> list[Traffic]:
    """An all-to-all of partial results in each layer."""
    return exchange_traffic(step, "q_replicated")


def check(step: Step) -> str | None:
    """Any heads: where cp does not divide them the last ranks have fewer."""
    return None


STRATEGY = Strategy(
    name="q_replicated",
    sublayer="decode_attention",
    axes=("cp",),
    collectives=("all_to_all",),
    needs="any heads",
    run=run,
    traffic=traffic,
    check=check,
)
