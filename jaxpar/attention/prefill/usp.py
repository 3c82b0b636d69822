"""`usp`: Ulysses inside, ring outside, as two factors of cp (Unified Sequence Parallelism, arXiv:2405.07719).

    cp = 4 as 2 x 2       ranks 0 1 and 2 3 exchange tokens for heads; then the keys of their heads travel
                          0 1         from 0 to 2 and from 1 to 3, and back
                          | |
                          2 3         `ulysses_degree` is the inner factor, the ring's is cp / ulysses_degree

Ulysses moves less where heads suffice; the ring goes on where they run out.
"""

from __future__ import annotations

import jax
from jax import lax

from jaxpar.attention.inputs import Inputs
from jaxpar.attention.prefill.positions import gather_traffic, of_every_rank, side_by_side
from jaxpar.attention.prefill.ring import hop_traffic, ring_attention
from jaxpar.attention.prefill.ulysses import (
    bag_bytes_over,
    exchange_traffic,
    heads_over,
    heads_share,
    to_heads,
    to_tokens,
)
from jaxpar.collectives import rank_index
from jaxpar.ledger.traffic import Traffic
from jaxpar.plan import Plan
from jaxpar.strategies import Share, Step, Strategy


def inner_degree(plan: Plan, kv_heads: int) -> int:
    """The inner factor of cp: as the plan says, or the largest that leaves every rank KV heads of its own."""
    cp = plan.mesh.cp
    return plan.ulysses_degree or max(d for d in range(1, cp + 1) if cp % d == 0 and (kv_heads % d == 0))


def prepare(q_positions: jax.Array, k_positions: jax.Array, plan: Plan) -> tuple[jax.Array, jax.Array]:
    """The positions of every rank's tokens [cp, B, T] and keys [cp, B, S]."""
    return of_every_rank(q_positions, plan), of_every_rank(k_positions, plan)


def run(x: Inputs, plan: Plan, prepared: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Attention of the rank's queries over the keys of all ranks -> [B, T, H, d]."""
    axes, inner = plan.sequence, inner_degree(plan, x.kv_heads)
    outer = plan.mesh.cp // inner
    mine = rank_index(axes) // inner
    inside = [list(range(group * inner, (group + 1) * inner)) for group in range(outer)]
    rings = [list(range(place, plan.mesh.cp, inner)) for place in range(inner)]

    def positions(every: jax.Array, group: jax.Array | int) -> jax.Array:
        return side_by_side(lax.dynamic_slice_in_dim(every, group * inner, inner))

    layout = heads_over(x.kv_heads, x.group, inner)
    whole = to_heads(x, layout, axes, inside)._replace(q_positions=positions(prepared[0], mine))
    part = ring_attention(whole, lambda step: positions(prepared[1], (mine - step) % outer), outer, axes, rings)
    return to_tokens(whole.finish(part).astype(x.q.dtype), layout, axes, inside)


def traffic(step: Step) -> list[Traffic]:
    """Ulysses' exchanges over the inner ranks, the ring's hops of what a rank then has; positions once."""
    inner = inner_degree(step.plan, step.heads.kv_local)
    return [
        *gather_traffic(step, "usp", step.tokens, step.keys),
        *exchange_traffic(step, "usp", inner),
        *hop_traffic(step, "usp", step.plan.mesh.cp // inner, bag_bytes_over(step, inner)),
    ]


def check(step: Step) -> str | None:
    """The inner factor divides cp, and every one of its ranks has a query head of its own."""
    cp, degree, heads = step.plan.mesh.cp, step.plan.ulysses_degree, step.heads.q_local
    if degree and cp % degree:
        return f"ulysses_degree={degree} does not divide cp={cp}: use a factor of it"
    if degree > heads:
        return f"ulysses_degree={degree} is more than the {heads} query heads of a rank: use a smaller one"
    return None


def share(step: Step, rank: int) -> Share:
    """The queries of the rank's inner group over the keys of each group in turn, for the rank's heads."""
    inner, cp = inner_degree(step.plan, step.heads.kv_local), step.plan.mesh.cp
    groups = [list(range(first, first + inner)) for first in range(0, cp, inner)]
    return heads_share(step, rank, inner, [(groups[rank // inner], other) for other in groups])


STRATEGY = Strategy(
    name="usp",
    sublayer="prefill_attention",
    axes=("cp",),
    collectives=("all_gather", "all_to_all", "ppermute"),
    needs="ulysses_degree divides cp; a query head for each rank",
    run=run,
    traffic=traffic,
    check=check,
    prepare=prepare,
    share=share,
)
