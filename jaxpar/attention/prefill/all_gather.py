"""`all_gather`: every rank gets the keys and values of all ranks, and attends to them with its own queries.

rank 0   kv0 | kv1 | kv2 | kv3        the ring's bytes in one call instead of cp - 1 hops, and cp times the memory
rank 1   kv0 | kv1 | kv2 | kv3        (Llama 3, arXiv:2407.21783)
"""

from __future__ import annotations

import jax

from jaxpar.attention.inputs import Inputs
from jaxpar.attention.prefill.positions import gather_traffic, of_every_rank, side_by_side
from jaxpar.collectives import all_gather
from jaxpar.ledger.traffic import Traffic
from jaxpar.plan import Plan
from jaxpar.strategies import Share, Step, Strategy, own_share


def prepare(q_positions: jax.Array, k_positions: jax.Array, plan: Plan) -> jax.Array:
    """The positions of all keys [B, cp * S]."""
    return side_by_side(of_every_rank(k_positions, plan))


def run(x: Inputs, plan: Plan, prepared: jax.Array) -> jax.Array:
    """Attention of the rank's queries over the keys of all ranks -> [B, T, H, d] float32."""
    first, second = (all_gather(plane, plan.sequence, dimension=2) for plane in x.bag)
    return x.finish(x._replace(bag=(first, second), k_positions=prepared).attend())


def traffic(step: Step) -> list[Traffic]:
    """Two all-gathers a layer, of keys and of values; positions once."""
    scope, layers = ("prefill_attention", "all_gather"), step.layers
    return [
        *gather_traffic(step, "all_gather", step.keys),
        *(step.sends(scope, "all_gather", step.plan.sequence, layers, plane) for plane in step.bag_bytes),
    ]


def check(step: Step) -> str | None:
    """Any heads, any lengths."""
    return None


def share(step: Step, rank: int) -> Share:
    """The rank's own queries over the keys of all ranks at once."""
    return own_share(step, rank)._replace(blocks=[([rank], list(range(step.plan.mesh.cp)))])


STRATEGY = Strategy(
    name="all_gather",
    sublayer="prefill_attention",
    axes=("cp",),
    collectives=("all_gather",),
    needs="memory for all keys of a layer",
    run=run,
    traffic=traffic,
    check=check,
    prepare=prepare,
    share=share,
)
