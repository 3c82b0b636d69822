"""The FLOPs of a program on one rank: its matrix products and convolutions, as its jaxpr says.

Inside `shard_map` shapes are local, so the count is one rank's. A multiply-add is two. Elementwise work, softmax,
norms and reductions are not counted: they are bound by memory and small beside the products.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jaxpar.ledger.scope import scope_of
from jaxpar.ledger.walk import Site, array_type, walk


@dataclass(frozen=True)
class Flops:
    """FLOPs of a sublayer on one rank, in one step or in one iteration of the loop that `per` names."""

    sublayer: str
    flops: int
    per: str = ""

    @property
    def name(self) -> str:
        """What a table of FLOPs calls them."""
        return per_iteration(self.sublayer, self.per)


def per_iteration(sublayer: str, per: str) -> str:
    """The name of a sublayer's FLOPs, in an iteration of the loop `per` if that is not empty."""
    return f"{sublayer} per {per}" if per else sublayer


def without_iterations(name: str) -> tuple[str, str]:
    """The sublayer and the loops of which `per_iteration` made a name."""
    sublayer, _, per = name.partition(" per ")
    return sublayer, per


def trace_flops(jaxpr: Jaxpr | ClosedJaxpr) -> list[Flops]:
    """FLOPs of a program, as `jax.make_jaxpr` gives it, by sublayer; "unscoped" outside every scope.

    Loops are multiplied out, an unknown trip count is counted per iteration, of a `cond` the costlier branch counts. A
    grouped product (`ragged_dot`) counts each row once, for its own group, whatever the
    backend makes of it.
    """

    def visit(eqn: JaxprEqn, site: Site) -> list[Flops]:
        flops = site.times * _flops(eqn)
        return [Flops(scope_of(site.scopes)[0], flops, site.per)] if flops else []

    totals: Counter[tuple[str, str]] = Counter()
    for row in walk(jaxpr, visit, lambda rows: sum(row.flops for row in rows)):
        totals[row.sublayer, row.per] += row.flops
    return [Flops(sublayer, flops, per) for (sublayer, per), flops in totals.items()]


def _flops(eqn: JaxprEqn) -> int:
    """FLOPs of one equation, once."""
    match eqn.primitive.name:
        case "dot_general":
            left, right = map(array_type, eqn.invars)
            (_, contracted), (_, batch) = eqn.params["dimension_numbers"]
            return 2 * left.size * _free(right.shape, (*contracted, *batch))
        case "ragged_dot_general":
            left, right = map(array_type, eqn.invars[:2])
            ragged = eqn.params["ragged_dot_dimension_numbers"]
            (_, contracted), (_, batch) = ragged.dot_dimension_numbers
            return 2 * left.size * _free(right.shape, (*contracted, *batch, *ragged.rhs_group_dimensions))
        case "conv_general_dilated":
            # Each output element sums over the kernel's positions and the input features of its group.
            kernel = array_type(eqn.invars[1]).shape
            return 2 * array_type(eqn.outvars[0]).size * _free(kernel, eqn.params["dimension_numbers"].rhs_spec[:1])
        case "pallas_call":
            # Only one that says its cost comes here; the walk goes into the others.
            flops: int = eqn.params["cost_estimate"].flops
            return flops
    return 0


def _free(shape: tuple[int, ...], bound: tuple[int, ...]) -> int:
    """Elements along the dimensions that are not `bound`."""
    return math.prod(size for dimension, size in enumerate(shape) if dimension not in bound)
