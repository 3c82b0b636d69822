"""What a way to add up partial results consists of, and what the sublayers of a step send by it.

A sum over P ranks is an all-reduce, or where each rank keeps a slice of the tokens its two halves, one at the end of a
sublayer and one at the beginning of the next:

    all-reduce       [R, D] on each rank        ->  their sum [R, D] on every rank
    reduce-scatter   [P * R, D] on each rank    ->  rank r: rows r * R to (r + 1) * R of the sum [R, D]
    all-gather       [R, D] on each rank        ->  [P * R, D] on every rank
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax

from jaxpar.collectives.move import gather_same
from jaxpar.collectives.reduce import all_sum, scatter_sum
from jaxpar.ledger.traffic import Traffic
from jaxpar.plan import Sublayer, SublayerName
from jaxpar.strategies import Step

Axes = tuple[str, ...]
Operation = Literal["all_reduce", "reduce_scatter", "all_gather"]


class Message(NamedTuple):
    """So many calls of a collective, each of a local operand of `size` bytes.

    `ranks` is the size of its groups where they are equal parts of the axes; None: all ranks of the axes.
    """

    collective: str
    calls: int
    size: int
    ranks: int | None = None


@dataclass(frozen=True)
class Reduction:
    """One way to add up what ranks have; every operation is the identity over no axes.

    Results of `all_reduce` and `all_gather` are of a type that says that all ranks have the same. `messages` is the
    closed form: what an operation sends for a local operand of `elements` numbers of `itemsize` bytes over `ranks`.
    """

    name: str
    all_reduce: Callable[[jax.Array, Axes], jax.Array]
    reduce_scatter: Callable[[jax.Array, Axes], jax.Array]
    all_gather: Callable[[jax.Array, Axes], jax.Array]
    messages: Callable[[Operation, int, int, int], list[Message]]

    def sent(
        self, step: Step, scope: tuple[str, str], operation: Operation, axes: Axes, calls: int, rows: int
    ) -> list[Traffic]:
        """What `calls` of an operation send for an operand of `rows` tokens; nothing over no axes."""
        if not axes:
            return []
        messages = self.messages(operation, rows * step.config.hidden_size, step.itemsize, step.ranks(axes))
        return [
            step.sends(scope, message.collective, axes, calls * message.calls, message.size, message.ranks)
            for message in messages
        ]


def _as_they_are(operation: Operation, elements: int, itemsize: int, ranks: int) -> list[Message]:
    return [Message(operation, 1, elements * itemsize)]


NATIVE = Reduction("psum", all_sum, scatter_sum, gather_same, _as_they_are)
"""The backend's own collectives."""


def enter_traffic(
    step: Step, scope: tuple[str, str], sublayer: Sublayer, calls: int, reduction: Reduction = NATIVE
) -> list[Traffic]:
    """What `enter` sends for the (sublayer, strategy) of `scope`: all-gathers of a rank's slice of the rows."""
    rows = -(-step.rows // step.ranks(sublayer.gather))
    return reduction.sent(step, scope, "all_gather", sublayer.gather, calls, rows)


def leave_traffic(
    step: Step, scope: tuple[str, str], sublayer: Sublayer, rows: int, calls: int, reduction: Reduction = NATIVE
) -> list[Traffic]:
    """What `leave` sends of a sublayer's `rows`.

    Reduce-scatters of the rows, filled up to a multiple of the ranks; sums of what is left; gathers of its slices.
    """
    found = []
    if sublayer.scatter:
        ranks = step.ranks(sublayer.scatter)
        rows = -(-rows // ranks)
        found += reduction.sent(step, scope, "reduce_scatter", sublayer.scatter, calls, rows * ranks)
    found += reduction.sent(step, scope, "all_reduce", sublayer.sum, calls, rows)
    found += NATIVE.sent(step, scope, "all_gather", sublayer.deal, calls, rows)
    return found


def sublayers_traffic(step: Step, reduction: Reduction) -> list[Traffic]:
    """What the sums of all layers send: after attention, and after the FFN or the experts.

    Where the residual stream is split over tp, each is an all-gather before and a reduce-scatter after. An MoE layer
    that deals its tokens out gathers the slices.
    """
    rows: list[Traffic] = []
    sublayers: list[tuple[str, SublayerName, int, int]] = [
        ("attention", step.attention, step.layers, step.rows),
        ("ffn", "ffn", step.dense_layers, step.rows),
        ("moe", "moe", step.moe_layers, step.moe_rows),
    ]
    for said, name, calls, count in sublayers:
        sublayer, scope = step.plan.sublayer(name, step.phase), (said, reduction.name)
        if calls:
            # A ring of products leaves a slice of the rows to be summed.
            count = -(-count // step.ranks(sublayer.ring_out))
            rows += enter_traffic(step, scope, sublayer, calls, reduction)
            rows += leave_traffic(step, scope, sublayer, count, calls, reduction)
    return rows
