"""`ring`: keys and values travel around cp, queries stay (Ring Attention, arXiv:2310.01889).

    step        0      1      2      3
    rank 0      kv0    kv3    kv2    kv1       each rank attends to the block that it has, onto what it has so far,
    rank 1      kv1    kv0    kv3    kv2       and has sent the block on before it began
    rank 2      kv2    kv1    kv0    kv3
    rank 3      kv3    kv2    kv1    kv0

A block holds all that a rank has cached of the requests, the chunk's tokens among it, so that a chunk sees its prefix
in the same pass. Tiles in which no query sees a key are skipped, whichever layout dealt the tokens. Of latent attention
latents travel, and each rank makes keys and values of them for its own heads as they arrive.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.attention.inputs import Inputs
from jaxpar.attention.latent import Bag
from jaxpar.attention.partial import Partial, no_keys
from jaxpar.attention.prefill.positions import gather_traffic, of_every_rank, of_rank
from jaxpar.collectives import rank_index, shift
from jaxpar.collectives.move import Groups
from jaxpar.kernels.attention import attend
from jaxpar.ledger.traffic import Traffic
from jaxpar.plan import Plan
from jaxpar.strategies import Share, Step, Strategy, own_share

_Carry = tuple[Bag, Partial]


def prepare(q_positions: jax.Array, k_positions: jax.Array, plan: Plan) -> jax.Array:
    """The positions of every rank's keys [cp, B, S]."""
    return of_every_rank(k_positions, plan)


def run(x: Inputs, plan: Plan, prepared: jax.Array) -> jax.Array:
    """Attention of the rank's queries over the keys of all ranks -> [B, T, H, d] float32."""
    rank, ranks = rank_index(plan.sequence), plan.mesh.cp

    def positions(step: jax.Array | int) -> jax.Array:
        return of_rank(prepared, (rank - step) % ranks)

    return x.finish(ring_attention(x, positions, ranks, plan.sequence))


def ring_attention(
    x: Inputs,
    positions: Callable[[jax.Array | int], jax.Array],
    ranks: int,
    axes: tuple[str, ...],
    groups: Groups = None,
) -> Partial:
    """The queries of `x` over the keys of all `ranks` of a ring, which come by in turn.

    Args:
        x: the rank's queries and the keys with which it begins.
        positions: of the keys that are here at a step, [B, S].
        ranks: of the ring; its hops are one fewer.
        axes: that the ring lies in.
        groups: the rings, where they are subgroups of the axis.
    """
    q, size = x.grouped, x.value_size

    def attend_to(step: jax.Array | int, bag: Bag, done: Partial) -> Partial:
        onto = Partial(done.out.reshape(*q.shape[:-1], size), done.lse.reshape(q.shape[:-1]))
        return attend(q, *x.expand(bag), x.q_positions, positions(step), x.window, x.scale, onto, x.fixed)

    def flat(done: Partial) -> Partial:
        # XLA:CPU orders dimensions of size 1 in a loop's carry as it likes, and would copy the result at every hop.
        return Partial(done.out.reshape(-1, size), done.lse.reshape(-1))

    def hop(carry: _Carry, step: jax.Array) -> tuple[_Carry, None]:
        bag, done = carry
        following = (shift(bag[0], axes, groups), shift(bag[1], axes, groups))
        return (following, flat(attend_to(step, bag, done))), None

    # A scan, not a Python loop: XLA overlaps the hops of a scan with its work on TPU and GPU.
    (bag, done), _ = lax.scan(hop, (x.bag, flat(no_keys(q, size, *x.bag))), jnp.arange(ranks - 1))
    return attend_to(ranks - 1, bag, done)


def hop_traffic(step: Step, strategy: str, ranks: int, messages: list[int]) -> list[Traffic]:
    """The hops around rings of `ranks` of a rank's planes, of as many bytes as `messages` has, in all layers."""
    if ranks == 1:
        return []
    scope, hops = ("prefill_attention", strategy), step.layers * (ranks - 1)
    return [step.sends(scope, "ppermute", step.plan.sequence, hops, message) for message in messages]


def traffic(step: Step) -> list[Traffic]:
    """Cp - 1 hops of a rank's keys and of its values in each layer; positions once."""
    return [
        *gather_traffic(step, "ring", step.keys),
        *hop_traffic(step, "ring", step.plan.mesh.cp, step.bag_bytes),
    ]


def check(step: Step) -> str | None:
    """Any heads, any lengths."""
    return None


def share(step: Step, rank: int) -> Share:
    """The rank's own queries over the keys of each rank in turn."""
    return own_share(step, rank)._replace(blocks=[([rank], [other]) for other in range(step.plan.mesh.cp)])


STRATEGY = Strategy(
    name="ring",
    sublayer="prefill_attention",
    axes=("cp",),
    collectives=("all_gather", "ppermute"),
    needs="any shape",
    run=run,
    traffic=traffic,
    check=check,
    prepare=prepare,
    share=share,
)
