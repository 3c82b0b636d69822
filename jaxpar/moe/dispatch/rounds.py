"""Messages to other ranks and results back, in rounds of a bounded buffer, over any axes.

    rank 0   | to 0 | to 1 | to 2 | to 3 |              | of 0 | of 1 | of 2 | of 3 |
    rank 1   | to 0 | to 1 | to 2 | to 3 |  all-to-all  | of 0 | of 1 | of 2 | of 3 |  -> work -> all-to-all back
    ...      |<- B->|                                     a round: B messages of each pair

Nothing is dropped, whatever the routing: counts are exchanged first, and all ranks run as many rounds as the fullest
pair needs. Memory is bounded by the buffer, B = ceil(what a rank sends another under even routing * slack): GShard's
capacity (arXiv:2006.16668) without its drops. Routing that is even up to the slack takes one round. With a capacity
given, there is one round, and what does not fit is dropped and counted, as GShard does.

With several `blocks` (`single_batch_overlap`) a round's rows go back block by block, the same share of every pair's:

    to experts | work 0 | work 1 | work 2
                        | back 0 | back 1 | back 2        no block waits for another one's way back
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.collectives import all_max, all_to_all, varying_axes
from jaxpar.ledger.scope import nested
from jaxpar.ledger.traffic import Traffic, merge
from jaxpar.mesh import AXES
from jaxpar.moe.dispatch.messages import Messages
from jaxpar.moe.dispatch.routes import Routes, routes
from jaxpar.moe.inputs import Dispatched, Inputs
from jaxpar.moe.loops import add_up
from jaxpar.overlap import even_parts
from jaxpar.strategies import Step

ROUNDS = "rounds"
"""What the ledger calls the iterations of the loop."""


def in_rounds(
    x: Inputs, messages: Messages, axes: tuple[str, ...], buffer: int, symbol: str = ROUNDS, blocks: int = 1
) -> jax.Array:
    """The messages of a rank's tokens to the ranks of `axes`, and their results summed by token -> [R, D] float32."""
    path = routes(messages.slots, messages.slots_per_rank, axes)
    fullest = path.sizes.max()
    # The same on the whole mesh, or ranks would part ways in the loop.
    rounds = -(-all_max(fullest, tuple(axis for axis in AXES if axis in varying_axes(fullest))) // buffer)
    a_round, most = _round(x, messages, path, axes, buffer, blocks), -(-messages.most // buffer)
    return add_up(a_round, x.nothing, rounds, most, symbol, x.differentiable)


def in_one_round(x: Inputs, messages: Messages, axes: tuple[str, ...], buffer: int, blocks: int = 1) -> Dispatched:
    """The same without those messages of a pair for which its buffer has no room."""
    path = routes(messages.slots, messages.slots_per_rank, axes)
    done = _round(x, messages, path, axes, buffer, blocks)(0, x.nothing)
    return Dispatched(done, jnp.maximum(path.sizes - buffer, 0).sum())


def _round(
    x: Inputs, messages: Messages, path: Routes, axes: tuple[str, ...], buffer: int, blocks: int
) -> Callable[[jax.Array | int, jax.Array], jax.Array]:
    """What round `index` adds to the results [R, D]."""
    choices, ranks = x.slots.shape[1], lax.axis_size(axes)

    def add(index: jax.Array | int, done: jax.Array) -> jax.Array:
        choice, there = path.sent(index * buffer, buffer)
        arrived = tuple(all_to_all(part, axes, 0, 0) for part in messages.pack(choice))
        slots = path.received(index * buffer, buffer)
        tokens, weights = choice // choices, jnp.where(there, messages.weights[choice], 0.0)
        first = 0
        for rows in even_parts(buffer, blocks):
            block = slice(first, first + rows)
            of_block = tuple(part[:, block].reshape(ranks * rows, part.shape[2]) for part in arrived)
            results = messages.work(of_block, slots[:, block].reshape(-1)).astype(x.x.dtype)
            back = all_to_all(results.reshape(ranks, rows, results.shape[1]), axes, 0, 0)
            done = done.at[tokens[:, block]].add(back * weights[:, block, None])
            first += rows
        return done

    return add


def rounds_traffic(
    step: Step,
    strategy: str,
    axes: tuple[str, ...],
    buffer: int,
    counted: int,
    carried: int,
    per: str,
    around: str = "",
    blocks: int = 1,
    derivative: bool = False,
) -> list[Traffic]:
    """What either sends in all layers: counts and the maximum of rounds, then rows there and back in each round.

    The derivative of a round takes the round once more and then its exchanges the other way round. Results that came
    back matter to it only where they were weighed at home, per choice. Counts have no derivative, but are taken once
    more with the round around them.

    Args:
        step: whose tokens they are.
        strategy: that the rows are of.
        axes: over which messages go.
        buffer: messages of a pair in a round.
        counted: counts that a rank has of each other's messages.
        carried: choices that go with a row; none per choice.
        per: what the rounds are called; "" if there is one in any case, and no maximum.
        around: the loop around them, if there is one.
        blocks: in which the rows of a round go back.
        derivative: what the derivative sends instead, of more than one round.
    """
    scope, layers, ranks = ("moe_dispatch", strategy), step.moe_layers, step.ranks(axes)
    counts, there, back = (int(bool(around)), 2, 1 if carried else 2) if derivative else (1, 1, 1)
    once = []
    if counts:
        once.append(step.sends(scope, "all_to_all", axes, layers, ranks * counted * 4))
    if counts and per:
        once.append(step.sends(scope, "all_reduce", step.routed, layers, 4))
    a_round = [
        step.sends(scope, "all_to_all", axes, times * layers, ranks * rows * step.row_bytes)
        for times, rows in ((there, buffer), *((back, rows) for rows in even_parts(buffer, blocks)))
    ]
    if carried:
        a_round.append(step.sends(scope, "all_to_all", axes, there * layers, ranks * buffer * 2 * carried * 4))
    inside = nested(around, per) if per else around
    return merge([*(replace(row, per=around) for row in once), *(replace(row, per=inside) for row in a_round)])
