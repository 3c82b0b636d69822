"""`ring_q`: queries travel around cp, keys stay; one all-to-all brings the partial results home.

    step        0     1     2     3
    rank 0      q0    q3    q2    q1        rank r keeps its partial result for every rank's queries, and each gets
    rank 1      q1    q0    q3    q2        its own back from all of them at the end (pass-Q, arXiv:2411.01783)
    rank 2      q2    q1    q0    q3

Queries and their results are as long as the chunk, however long the cached prefix: the better deal for a short chunk.
A rank holds partial results for all of its tokens until the end, which does not fall with cp.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.attention.inputs import Inputs
from jaxpar.attention.packed import pack, packed_bytes, unpack
from jaxpar.attention.partial import merge_all
from jaxpar.attention.prefill.positions import gather_traffic, of_every_rank, of_rank
from jaxpar.collectives import all_to_all, rank_index, shift
from jaxpar.kernels.attention import attend
from jaxpar.ledger.traffic import Traffic
from jaxpar.plan import Plan
from jaxpar.strategies import Share, Step, Strategy, own_share


def prepare(q_positions: jax.Array, k_positions: jax.Array, plan: Plan) -> jax.Array:
    """The positions of every rank's tokens [cp, B, T]."""
    return of_every_rank(q_positions, plan)


def run(x: Inputs, plan: Plan, prepared: jax.Array) -> jax.Array:
    """Attention of the rank's queries over the keys of all ranks -> [B, T, H, d] float32."""
    axes, ranks = plan.sequence, plan.mesh.cp
    rank, keys = rank_index(axes), x.expand(x.bag)

    def visit(q: jax.Array, step: jax.Array | int) -> jax.Array:
        q_positions = of_rank(prepared, (rank - step) % ranks)
        return pack(attend(q, *keys, q_positions, x.k_positions, x.window, x.scale), x.q.dtype)

    def hop(q: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        following = shift(q, axes)
        return following, visit(q, step)

    q, parts = lax.scan(hop, x.grouped, jnp.arange(ranks - 1))
    parts = jnp.concatenate([parts, visit(q, ranks - 1)[None]])
    of_owner = jnp.take(parts, (rank - jnp.arange(ranks)) % ranks, axis=0)
    return x.finish(merge_all(unpack(all_to_all(of_owner, axes, split=0, concat=0), x.q.dtype)))


def traffic(step: Step) -> list[Traffic]:
    """Cp - 1 hops of the queries and one all-to-all of partial results in each layer; positions once."""
    layers, ranks, axes = step.layers, step.plan.mesh.cp, step.plan.sequence
    scope, vectors = ("prefill_attention", "ring_q"), step.rows * step.heads.q_local
    query = vectors * step.config.head_dim * step.itemsize
    parts = ranks * vectors * packed_bytes(step.config.v_head_dim, step.itemsize)
    return [
        *gather_traffic(step, "ring_q", step.tokens),
        step.sends(scope, "ppermute", axes, layers * (ranks - 1), query),
        step.sends(scope, "all_to_all", axes, layers, parts),
    ]


def check(step: Step) -> str | None:
    """Any heads, any lengths."""
    return None


def share(step: Step, rank: int) -> Share:
    """The queries of each rank in turn over the rank's own keys."""
    return own_share(step, rank)._replace(blocks=[([other], [rank]) for other in range(step.plan.mesh.cp)])


STRATEGY = Strategy(
    name="ring_q",
    sublayer="prefill_attention",
    axes=("cp",),
    collectives=("all_gather", "ppermute", "all_to_all"),
    needs="memory for partial results of the whole chunk",
    run=run,
    traffic=traffic,
    check=check,
    prepare=prepare,
    share=share,
)
