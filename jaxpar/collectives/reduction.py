"""What a way to add up partial results consists of, and what the sublayers of a step send by it.

A sum over P ranks is an all-reduce, or where each rank keeps a slice of the tokens its two halves, one at the end of a
sublayer and one at the beginning of the next:

    all-reduce       [R, D] on each rank        ->  their sum [R, D] on every rank
    reduce-scatter   [P * R, D] on each rank    ->  rank r: rows r * R to (r + 1) * R of the sum [R, D]
    all-gather       [R, D] on each rank        ->  [P * R, D] on every rank
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from jaxpar.collectives.bounds import each_addition
from jaxpar.collectives.move import gather_same
from jaxpar.collectives.reduce import all_sum, scatter_sum
from jaxpar.ledger.traffic import Traffic
from jaxpar.plan import Sublayer, SublayerName
from jaxpar.strategies import Step

Axes = tuple[str, ...]
Operation = Literal["all_reduce", "reduce_scatter", "all_gather"]


class Message(NamedTuple):
    """So many calls of a collective, each of a local operand of `size` bytes.

    `ranks` is the size of its groups where they are equal parts of the axes; None: all ranks of the axes. `axes` are
    those that it runs over where these are not all of the operation's. `inside`: each group lies inside one node.
    `distance`: a ppermute goes to the rank so many places on.
    """

    collective: str
    calls: int
    size: int
    ranks: int | None = None
    axes: Axes | None = None
    inside: bool = False
    distance: int = 1


Messages = Callable[[Operation, int, int, int, Mapping[str, int]], list[Message]]


class Call(NamedTuple):
    """So many calls of an operation over `axes` for an operand of `rows` tokens."""

    operation: Operation
    axes: Axes
    calls: int
    rows: int


@dataclass(frozen=True)
class Reduction:
    """One way to add up what ranks have; every operation is the identity over no axes.

    Results of `all_reduce` and `all_gather` are of a type that says that all ranks have the same, and they do, in every
    bit. `messages` is the closed form: what an operation sends for a local operand [`rows`, `width`] of numbers of
    `itemsize` bytes over axes of these sizes, the mesh's order. `error_bound` says how far an all-reduce may lie from
    the exact sum [...] of float64 `parts` [P, ...], given the dtype.
    """

    name: str
    all_reduce: Callable[[jax.Array, Axes], jax.Array]
    reduce_scatter: Callable[[jax.Array, Axes], jax.Array]
    all_gather: Callable[[jax.Array, Axes], jax.Array]
    messages: Messages
    error_bound: Callable[[np.ndarray, Any], np.ndarray] = each_addition

    def sends(self, step: Step, call: Call) -> list[Message]:
        """The messages of all calls of an operation; none over no axes."""
        if not call.axes:
            return []
        sizes = {axis: step.plan.mesh.sizes[axis] for axis in call.axes}
        messages = self.messages(call.operation, call.rows, step.config.hidden_size, step.itemsize, sizes)
        return [message._replace(calls=call.calls * message.calls) for message in messages]

    def sent(self, step: Step, scope: tuple[str, str], call: Call) -> list[Traffic]:
        """What all calls of an operation send."""
        return [
            step.sends(scope, one.collective, one.axes or call.axes, one.calls, one.size, one.ranks)
            for one in self.sends(step, call)
        ]


def _as_they_are(operation: Operation, rows: int, width: int, itemsize: int, sizes: Mapping[str, int]) -> list[Message]:
    return [Message(operation, 1, rows * width * itemsize)]


NATIVE = Reduction("psum", all_sum, scatter_sum, gather_same, _as_they_are)
"""The backend's own collectives."""


def all_reduce_only(
    name: str,
    all_reduce: Callable[[jax.Array, Axes], jax.Array],
    messages: Callable[[int, int, Mapping[str, int]], list[Message]],
    error_bound: Callable[[np.ndarray, Any], np.ndarray] = each_addition,
) -> Reduction:
    """A reduction that has no halves of its own: where the residual stream is split, the backend's are used.

    `messages` are those of an all-reduce of so many elements, however they lie in rows.
    """

    def of(operation: Operation, rows: int, width: int, itemsize: int, sizes: Mapping[str, int]) -> list[Message]:
        if operation == "all_reduce":
            return messages(rows * width, itemsize, sizes)
        return _as_they_are(operation, rows, width, itemsize, sizes)

    return replace(NATIVE, name=name, all_reduce=all_reduce, messages=of, error_bound=error_bound)


def enter_traffic(
    step: Step, scope: tuple[str, str], sublayer: Sublayer, calls: int, reduction: Reduction = NATIVE
) -> list[Traffic]:
    """What `enter` sends for the (sublayer, strategy) of `scope`: all-gathers of a rank's slice of the rows."""
    return [row for call in _entering(step, sublayer, calls) for row in reduction.sent(step, scope, call)]


def leave_traffic(
    step: Step, scope: tuple[str, str], sublayer: Sublayer, rows: int, calls: int, reduction: Reduction = NATIVE
) -> list[Traffic]:
    """What `leave` sends of a sublayer's `rows`.

    Reduce-scatters of the rows, filled up to a multiple of the ranks; sums of what is left; gathers of its slices.
    """
    left = -(-rows // step.ranks(sublayer.scatter))
    summed = [row for call in _leaving(step, sublayer, rows, calls) for row in reduction.sent(step, scope, call)]
    return [*summed, *NATIVE.sent(step, scope, Call("all_gather", sublayer.deal, calls, left))]


def _entering(step: Step, sublayer: Sublayer, calls: int) -> list[Call]:
    return [Call("all_gather", sublayer.gather, calls, -(-step.rows // step.ranks(sublayer.gather)))]


def _leaving(step: Step, sublayer: Sublayer, rows: int, calls: int) -> list[Call]:
    ranks = step.ranks(sublayer.scatter)
    left = -(-rows // ranks)
    scattered = [Call("reduce_scatter", sublayer.scatter, calls, left * ranks)] if sublayer.scatter else []
    return [*scattered, Call("all_reduce", sublayer.sum, calls, left)]


def summed_sublayers(step: Step) -> Iterator[tuple[str, Sublayer, int, int]]:
    """Those whose parts are added up: the name, how it joins the residual stream, layers that have it, and its rows."""
    sublayers: list[tuple[str, SublayerName, int, int]] = [
        ("attention", step.attention, step.layers, step.rows),
        ("ffn", "ffn", step.dense_layers, step.rows),
        ("moe", "moe", step.moe_layers, step.moe_rows),
    ]
    for said, name, layers, rows in sublayers:
        sublayer = step.plan.sublayer(name, step.phase)
        if layers:
            # A ring of products leaves a slice of the rows to be summed.
            yield said, sublayer, layers, -(-rows // step.ranks(sublayer.ring_out))


def sublayers_calls(step: Step) -> list[Call]:
    """The operations of a step's layers, in which reductions differ, those over no axes left out."""
    calls = [
        call
        for _, sublayer, layers, rows in summed_sublayers(step)
        for call in (*_entering(step, sublayer, layers), *_leaving(step, sublayer, rows, layers))
    ]
    return [call for call in calls if call.axes]


def sublayers_traffic(step: Step, reduction: Reduction) -> list[Traffic]:
    """What the sums of all layers send: after attention, and after the FFN or the experts.

    Where the residual stream is split over tp, each is an all-gather before and a reduce-scatter after. An MoE layer
    that deals its tokens out gathers the slices.
    """
    found: list[Traffic] = []
    for said, sublayer, layers, rows in summed_sublayers(step):
        scope = (said, reduction.name)
        found += enter_traffic(step, scope, sublayer, layers, reduction)
        found += leave_traffic(step, scope, sublayer, rows, layers, reduction)
    return found
