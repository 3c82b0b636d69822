"""`ag_rs`: queries are gathered over cp, LSE gathered, outputs rescaled and reduce-scattered over heads.

    project          rank c: the c-th slice of the query heads        all-gather over cp
    attend           rank c: all heads over its own keys
    rescale          rank c: its outputs by exp(its LSE - LSE of all)     all-gather of LSE over cp
    reduce-scatter   rank c: the c-th slice of the heads, summed

Decode context parallelism as vLLM runs it; outputs are rounded to the dtype of the activations before they are summed.
What is sent does not depend on the length of the context.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpar.attention.decode.exchange import gather_queries, query_traffic, rescale_traffic
from jaxpar.attention.inputs import Inputs, by_token, pad_heads
from jaxpar.attention.partial import weighted, weights_among
from jaxpar.collectives import all_gather, scatter_sum
from jaxpar.ledger.traffic import Traffic
from jaxpar.plan import Plan
from jaxpar.strategies import Step, Strategy


def run(x: Inputs, plan: Plan, prepared: None) -> jax.Array:
    """A slice of the query heads [B, T, H/cp, d] -> attention of the same heads over the keys of all ranks."""
    whole = gather_queries(x, plan)
    part = whole.attend()
    out, lse = by_token(part.out), by_token(part.lse)
    every = all_gather(lse[None], plan.sequence)
    if x.sinks is not None:
        every = jnp.concatenate([every, jnp.broadcast_to(x.sinks, (1, *lse.shape))])
    weights = weights_among(lse[None], every)[0]
    scaled = pad_heads(weighted(out, weights), plan.mesh.cp).astype(x.q.dtype)
    return scatter_sum(scaled, plan.sequence, dimension=2)


def traffic(step: Step) -> list[Traffic]:
    """All-gathers of queries and of LSE and a reduce-scatter of outputs in each layer."""
    return [*query_traffic(step, "ag_rs"), *rescale_traffic(step, "ag_rs")]


def check(step: Step) -> str | None:
    """Any heads: where cp does not divide them the last ranks have fewer."""
    return None


STRATEGY = Strategy(
    name="ag_rs",
    sublayer="decode_attention",
    axes=("cp",),
    collectives=("all_gather", "reduce_scatter"),
    needs="any heads",
    run=run,
    traffic=traffic,
    check=check,
    query_axes=("cp",),
)
