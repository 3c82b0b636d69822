"""`a2a`: queries are gathered over cp; one all-to-all exchanges partial outputs with their LSE for heads.

    project    rank c: the c-th slice of the query heads         all-gather over cp: all heads on each rank
    attend     rank c: all heads over its own keys               keys never move
    exchange   rank c: the c-th slice of the heads, merged       all-to-all over cp

What is sent does not depend on the length of the context.
"""

from __future__ import annotations

import jax

from jaxpar.attention.decode.exchange import (
    exchange,
    exchange_traffic,
    gather_queries,
    query_traffic,
)
from jaxpar.attention.inputs import Inputs
from jaxpar.ledger.traffic import Traffic
from jaxpar.plan import Plan
from jaxpar.strategies import Step, Strategy


def run(x: Inputs, plan: Plan, prepared: None) -> jax.Array:
    """A slice of the query heads [B, T, H/cp, d] -> attention of the same heads over the keys of all ranks."""
    return exchange(gather_queries(x, plan), plan)


def traffic(step: Step) -> list[Traffic]:
    """An all-gather of queries and an all-to-all of partial results in each layer."""
    return [*query_traffic(step, "a2a"), *exchange_traffic(step, "a2a")]


def check(step: Step) -> str | None:
    """Any heads: where cp does not divide them the last ranks have fewer."""
    return None


STRATEGY = Strategy(
    name="a2a",
    sublayer="decode_attention",
    axes=("cp",),
    collectives=("all_gather", "all_to_all"),
    needs="any heads",
    run=run,
    traffic=traffic,
    check=check,
    query_axes=("cp",),
)
