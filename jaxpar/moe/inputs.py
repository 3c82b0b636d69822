"""What one MoE layer dispatches, as every strategy takes it, and how a rank runs rows through its own experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.collectives.types import match_varying
from jaxpar.fixed import by_row
from jaxpar.moe.grouped import sort_by_expert
from jaxpar.moe.loops import add_up

BLOCKS = "blocks"
"""What the ledger calls the iterations of `sum_in_blocks`."""


class Experts(NamedTuple):
    """The experts in a rank's S slots.

    `run`: rows [N, D] sorted by slot and the rows [S] of each slot -> their results [N, D] float32, 0 for other rows.
    `gate_up` is one of their weights: results vary over the axes over which it does.
    """

    run: Callable[[jax.Array, jax.Array], jax.Array]
    gate_up: jax.Array


class Inputs(NamedTuple):
    """R tokens of a rank, each with k choices, and the experts in the rank's own S slots.

    `x` [R, D]; `slots` [R, k] int32 of the slots of the ranks that the choices are among, P * S for none, those of a
    token all different; `weights` [R, k] float32, 0 for none; `experts` runs rows through those in the rank's slots.
    `room` is that of Step; `differentiable`: loops get a bound, so that derivatives pass through them (training).
    `fixed` as in `jaxpar.fixed`.
    """

    x: jax.Array
    slots: jax.Array
    weights: jax.Array
    experts: Experts
    slots_per_rank: int
    room: int = 0
    differentiable: bool = False
    fixed: bool = False

    @property
    def nothing(self) -> jax.Array:
        """Zeros [R, D] float32, typed to have results added to them."""
        return match_varying(jnp.zeros(self.x.shape, jnp.float32), self.x, self.slots, self.experts.gate_up)


class Dispatched(NamedTuple):
    """The weighted sums [R, D] of what experts make of a rank's tokens, and how many of its messages were dropped.

    `dropped` is an int32, or None where nothing ever is.
    """

    rows: jax.Array
    dropped: jax.Array | None = None


def through_experts(rows: jax.Array, slots: jax.Array, experts: Experts, count: int) -> jax.Array:
    """Each of `rows` [N, D] through the expert in its local slot [N], `count` and above: none -> [N, D] float32."""
    order, counts = sort_by_expert(slots, count)
    done = experts.run(rows[order], counts)
    return jnp.zeros_like(done).at[order].set(done, unique_indices=True)


def weighted_sum(x: Inputs) -> jax.Array:
    """Tokens through those of their choices that are slots of this rank, summed by weight -> [R, D] float32."""
    tokens, choices = x.slots.shape
    order, counts = sort_by_expert(x.slots.reshape(-1), x.slots_per_rank)
    done = x.experts.run(x.x[order // choices], counts)
    by_choice = jnp.zeros_like(done).at[order].set(done, unique_indices=True).reshape(tokens, choices, -1)

    def add(by_choice: jax.Array, weights: jax.Array) -> jax.Array:
        return (by_choice * weights[:, :, None]).sum(axis=1)

    return by_row(add, by_choice, x.weights, fixed=x.fixed)


def sum_in_blocks(x: Inputs, block: int) -> jax.Array:
    """`weighted_sum` of tokens most of whose choices are none: `block` choices at a time, as often as it takes.

    Memory is that of a block, and not of R * k rows.
    """
    choices = x.slots.shape[1]
    order, counts = sort_by_expert(x.slots.reshape(-1), x.slots_per_rank)
    ends, weights = jnp.cumsum(counts), x.weights.reshape(-1)

    def add(index: jax.Array, done: jax.Array) -> jax.Array:
        first = index * block
        row = first + jnp.arange(block)
        choice = order[jnp.minimum(row, len(order) - 1)]
        of_block = jnp.diff(jnp.clip(ends - first, 0, block), prepend=0)
        results = x.experts.run(x.x[choice // choices], of_block)
        return done.at[choice // choices].add(results * jnp.where(row < ends[-1], weights[choice], 0.0)[:, None])

    most = -(-len(order) // block)
    return add_up(add, x.nothing, -(-ends[-1] // block), most, BLOCKS, x.differentiable)


def local_choices(
    slots: jax.Array, weights: jax.Array, first: jax.Array | int, count: int
) -> tuple[jax.Array, jax.Array]:
    """Choices [..., k] among `count` slots from `first` on, which become 0, 1, ...; the others: `count`, weight 0."""
    local = slots - first
    mine = (local >= 0) & (local < count)
    return jnp.where(mine, local, count), jnp.where(mine, weights, 0.0)


def pack_routing(slots: jax.Array, weights: jax.Array) -> jax.Array:
    """Slots and weights [..., k] as one float32 array [..., 2k] to be sent, through which derivatives pass."""
    return jnp.concatenate([slots.astype(jnp.float32), weights], axis=-1)


def unpack_routing(routing: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What `pack_routing` was given: float32 has every whole number below 2^24."""
    slots, weights = jnp.split(routing, 2, axis=-1)
    return slots.astype(jnp.int32), weights
