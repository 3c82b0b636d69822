"""`ulysses`: from a slice of the tokens to a slice of the heads and back (DeepSpeed-Ulysses, arXiv:2309.14509).

    before: tokens over cp            all-to-all            between: heads over cp           all-to-all back
    rank 0   t0 t1   h0 h1 h2 h3      ----------->          rank 0   t0 t1 t2 t3   h0 h1     of the output
    rank 1   t2 t3   h0 h1 h2 h3                            rank 1   t0 t1 t2 t3   h2 h3

Queries, keys and values go to the rank of their heads. Where there are fewer KV heads than ranks, copies of them are
sent, and where heads do not divide, zeros: `heads.split_heads` deals them, as it does over tp. Latents (MLA) serve all
heads: every rank gathers those of all ranks, and makes keys and values of them for its heads alone.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpar.attention.inputs import Inputs
from jaxpar.attention.prefill.positions import gather_traffic, of_every_rank, side_by_side
from jaxpar.collectives import all_gather, all_to_all, rank_index
from jaxpar.collectives.move import Groups
from jaxpar.heads import PADDED, HeadLayout, split_heads
from jaxpar.ledger.traffic import Traffic
from jaxpar.plan import Plan
from jaxpar.strategies import Share, Step, Strategy


def prepare(q_positions: jax.Array, k_positions: jax.Array, plan: Plan) -> tuple[jax.Array, jax.Array]:
    """The positions of all tokens [B, cp * T] and of all keys [B, cp * S]."""
    q, k = of_every_rank(q_positions, plan), of_every_rank(k_positions, plan)
    return side_by_side(q), side_by_side(k)


def run(x: Inputs, plan: Plan, prepared: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Attention of the rank's queries over the keys of all ranks -> [B, T, H, d]."""
    layout = heads_over(x.kv_heads, x.group, plan.mesh.cp)
    mine = to_heads(x, layout, plan.sequence)._replace(q_positions=prepared[0], k_positions=prepared[1])
    return to_tokens(mine.finish(mine.attend()).astype(x.q.dtype), layout, plan.sequence)


def heads_over(kv_heads: int, group: int, ranks: int) -> HeadLayout:
    """How a rank's heads are dealt over the ranks of the all-to-all."""
    return split_heads(kv_heads * group, kv_heads, ranks)


def to_heads(x: Inputs, layout: HeadLayout, axes: tuple[str, ...], groups: Groups = None) -> Inputs:
    """The queries, keys and values of all ranks' tokens, for this rank's heads; positions are left as they are."""
    rank = rank_index(axes) % layout.tp

    def own(per_head: jax.Array, heads: tuple[int, ...]) -> jax.Array:
        """This rank's heads of what every rank has of all of them."""
        count = len(heads) // layout.tp
        return lax.dynamic_slice_in_dim(_deal(per_head, heads, 0), rank * count, count)

    def exchange(plane: jax.Array) -> jax.Array:
        if x.latent is not None:
            return all_gather(plane, axes, dimension=2, groups=groups)
        return all_to_all(_deal(plane, layout.kv_heads, 0), axes, split=0, concat=2, groups=groups)

    return x._replace(
        q=all_to_all(_deal(x.q, layout.q_heads, 2), axes, split=2, concat=1, groups=groups),
        bag=(exchange(x.bag[0]), exchange(x.bag[1])),
        group=layout.group,
        sinks=None if x.sinks is None else own(x.sinks, layout.q_heads),
        latent=x.latent and x.latent._replace(up=own(x.latent.up, layout.kv_heads)),
    )


def to_tokens(out: jax.Array, layout: HeadLayout, axes: tuple[str, ...], groups: Groups = None) -> jax.Array:
    """[B, all T, a rank's heads, d] -> [B, T, H, d]: the way back; copies and padding are left out."""
    dealt = all_to_all(out, axes, split=1, concat=2, groups=groups)
    where = {head: place for place, head in enumerate(layout.q_heads) if head != PADDED}
    return dealt[:, :, np.asarray([where[head] for head in range(len(where))])]


def _deal(x: jax.Array, heads: tuple[int, ...], dimension: int) -> jax.Array:
    """`x` with its heads in the order of `heads`, zeros where that says PADDED."""
    picked = jnp.take(x, np.maximum(heads, 0), axis=dimension)
    real = np.expand_dims(np.asarray(heads) != PADDED, tuple(i for i in range(x.ndim) if i != dimension))
    return jnp.where(real, picked, jnp.zeros((), x.dtype))


def exchange_traffic(step: Step, strategy: str, ranks: int) -> list[Traffic]:
    """What bringing tokens to heads over groups of `ranks` sends, and bringing outputs back, in all layers."""
    if ranks == 1:
        return []
    layers, scope, axes = step.layers, ("prefill_attention", strategy), step.plan.sequence
    vectors = ranks * step.rows * _layout(step, ranks).q_local * step.itemsize
    messages = [("all_to_all", vectors * size) for size in (step.config.head_dim, step.config.v_head_dim)]
    if step.config.mla is None:
        messages += [("all_to_all", plane) for plane in bag_bytes_over(step, ranks)]
    else:
        messages += [("all_gather", plane) for plane in step.bag_bytes]
    return [step.sends(scope, collective, axes, layers, message, ranks) for collective, message in messages]


def bag_bytes_over(step: Step, ranks: int) -> list[int]:
    """Bytes of each plane that a rank has of its group of `ranks` after the exchange: of its heads, or the latents."""
    if step.config.mla is not None:
        return [ranks * plane for plane in step.bag_bytes]
    heads = _layout(step, ranks).kv_local
    return [ranks * heads * plane // step.heads.kv_local for plane in step.bag_bytes]


def heads_share(step: Step, rank: int, ranks: int, blocks: list[tuple[list[int], list[int]]]) -> Share:
    """What a rank attends to after the exchange over groups of `ranks`: `blocks` for its share of the heads."""
    layout = _layout(step, ranks)
    mine = layout.q_heads[rank % ranks * layout.q_local : (rank % ranks + 1) * layout.q_local]
    return Share(blocks, layout.q_local, sum(head != PADDED for head in mine), layout.group)


def _layout(step: Step, ranks: int) -> HeadLayout:
    return heads_over(step.heads.kv_local, step.heads.group, ranks)


def traffic(step: Step) -> list[Traffic]:
    """Four all-to-alls a layer, of queries, keys, values and outputs (gathers of latents); positions once."""
    positions = gather_traffic(step, "ulysses", step.tokens, step.keys)
    return [*positions, *exchange_traffic(step, "ulysses", step.plan.mesh.cp)]


def check(step: Step) -> str | None:
    """Every rank needs a query head of its own."""
    cp, heads = step.plan.mesh.cp, step.heads.q_local
    if cp <= heads:
        return None
    return (
        f"prefill_attention='ulysses' needs a query head for each of cp={cp} ranks, and tp={step.plan.mesh.tp} leaves "
        f"{heads} on a rank: use usp, ring, or less cp"
    )


def share(step: Step, rank: int) -> Share:
    """All queries over all keys, for the rank's heads."""
    everyone = list(range(step.plan.mesh.cp))
    return heads_share(step, rank, step.plan.mesh.cp, [(everyone, everyone)])


STRATEGY = Strategy(
    name="ulysses",
    sublayer="prefill_attention",
    axes=("cp",),
    collectives=("all_gather", "all_to_all"),
    needs="a query head for each rank of cp",
    run=run,
    traffic=traffic,
    check=check,
    prepare=prepare,
    share=share,
)
