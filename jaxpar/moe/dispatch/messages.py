"""What is sent of a token: a row for each of its choices, or one for each rank that has any (deduplicated).

    token 0 chose slots 1 and 5, token 1 slots 4 and 5; ranks 0, 1, 2 have slots 0 1 | 2 3 | 4 5

                 to rank 0              to rank 2
    per choice   x0                     x1         x0        x1            weighed and summed where they come from
    per rank     x0 [1: w]              x0 [5: w]  x1 [4: w, 5: w]         where they go; one row comes back

One row per rank is how DeepEP sends (deepseek-ai/DeepEP): as many copies fewer as a token has choices on the same rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from jaxpar.moe.dispatch.sizes import block_rows, carried_choices
from jaxpar.moe.inputs import Inputs, local_choices, pack_routing, sum_in_blocks, through_experts, unpack_routing
from jaxpar.plan import Plan
from jaxpar.strategies import Step

Message = tuple[jax.Array, ...]
"""Arrays [..., W] of as many messages."""


@dataclass(frozen=True)
class Messages:
    """The messages of R tokens with k choices each; N = R * k, and a message stands where its choice does.

    `slots` [N] says where each goes, a slot of all ranks, of which each has `slots_per_rank`; any other number: there
    is none. `most` bounds those from one rank to another. `pack` makes messages of choices [...], and `work` results
    [M, D] of messages [M, ...] that came for local slots [M] (`slots_per_rank`: no message; its result is 0). The
    sender multiplies them by `weights` [N].
    """

    slots: jax.Array
    slots_per_rank: int
    most: int
    pack: Callable[[jax.Array], Message]
    work: Callable[[Message, jax.Array], jax.Array]
    weights: jax.Array


def planned(x: Inputs, plan: Plan) -> Messages:
    """What the plan sends of a token to ranks of its experts."""
    if plan.moe_deduplicate:
        return per_rank(x, x.slots_per_rank, own_experts(x, plan.single_batch_overlap))
    return per_choice(x)


def counted_and_carried(step: Step) -> tuple[int, int]:
    """Of `planned`: the counts that a rank has of each other's messages, and the choices that go with a row."""
    slots = step.slots_per_rank
    return (1, carried_choices(step.choices, slots)) if step.plan.moe_deduplicate else (slots, 0)


def own_experts(x: Inputs, blocks: int = 1) -> Callable[[Inputs], jax.Array]:
    """Copies, in so many blocks, through the experts of the rank that has them; `x` are the tokens of one rank."""
    rows, choices = x.slots.shape
    return partial(sum_in_blocks, block=block_rows(rows, choices, blocks))


def per_choice(x: Inputs) -> Messages:
    """A row for each choice, sent to the slot that it names."""
    rows, choices = x.slots.shape

    def pack(choice: jax.Array) -> Message:
        return (x.x[choice // choices],)

    def work(message: Message, slots: jax.Array) -> jax.Array:
        (row,) = message
        return through_experts(row, slots, x.experts, x.slots_per_rank)

    return Messages(x.slots.reshape(-1), x.slots_per_rank, rows * choices, pack, work, x.weights.reshape(-1))


def per_rank(x: Inputs, slots: int, work: Callable[[Inputs], jax.Array]) -> Messages:
    """A row and its choices for each rank that has one of them, `slots` slots a rank; `work` sums them there by weight.

    A rank may stand for several, whose slots are all its own: `work` then passes the rows on.
    """
    rows, choices = x.slots.shape
    carried = carried_choices(choices, slots)
    rank = x.slots // slots
    again = jnp.tril(rank[:, :, None] == rank[:, None, :], -1).any(axis=2)

    def pack(choice: jax.Array) -> Message:
        token = choice // choices
        first = rank.reshape(-1)[choice] * slots
        mine, weights = local_choices(x.slots[token], x.weights[token], first[..., None], slots)
        if carried < choices:
            best = jnp.argsort(mine, axis=-1)[..., :carried]
            mine, weights = (jnp.take_along_axis(both, best, axis=-1) for both in (mine, weights))
        return x.x[token], pack_routing(mine, weights)

    def unpack(message: Message, there: jax.Array) -> jax.Array:
        row, routing = message
        mine, weights = unpack_routing(routing)
        is_there = (there == 0)[:, None]
        return work(
            x._replace(x=row, slots=jnp.where(is_there, mine, slots), weights=jnp.where(is_there, weights, 0.0))
        )

    ones = jnp.ones((rows * choices,), jnp.float32)
    return Messages(jnp.where(again, -1, rank).reshape(-1), 1, rows, pack, unpack, ones)
