"""One walk over a program's jaxpr for everything that the ledger counts in it.

A program is a tree: equations hold further jaxprs (jit, shard_map, loops, branches, custom derivatives, remat,
kernels). The walk multiplies trip counts out, takes of a `cond` the branch that weighs most, and joins name stacks,
which JAX keeps relative to the equation around them.

Where a program is written differently for each platform (`lax.platform_dependent`), the walk takes what accelerators
run, on whatever machine it counts: a ledger is about a deployment, and faked CPU devices emulate one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, cast

from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from jaxpar.ledger.scope import loop_symbol, nested

T = TypeVar("T")


@dataclass(frozen=True)
class Site:
    """Where an equation stands: its scopes, and how often it runs.

    `times` counts one step, or one iteration of the loop with an unknown trip count that `per` names; `in_loop` are the
    scopes from that loop's body on.
    """

    scopes: str = ""
    times: int = 1
    per: str = ""
    in_loop: str = ""


def walk(
    jaxpr: Jaxpr | ClosedJaxpr,
    visit: Callable[[JaxprEqn, Site], list[T]],
    weight: Callable[[list[T]], int],
    site: Site = Site(),
) -> list[T]:
    """What `visit` gives for every equation that holds no jaxpr of its own, or says its cost, in program order.

    Of the branches of a `cond` only the one with the largest `weight` counts; of those for platforms the first that is
    not the CPU's. The condition of a `while` counts once per iteration; that it also runs after the last one is left
    out. A `scan` with a symbol of its own is one whose iterations are skipped from some point on (`moe.loops`).
    """
    found: list[T] = []
    for eqn in equations(jaxpr):
        inside = replace(site, scopes=scopes_of(eqn, site.scopes), in_loop=scopes_of(eqn, site.in_loop))
        inner = list(inner_jaxprs(eqn))
        name = eqn.primitive.name
        if not inner or says_its_cost(eqn):
            found += visit(eqn, inside)
        elif name == "cond":
            platforms = eqn.params.get("branches_platforms")
            run = inner if platforms is None else [inner[_of_accelerators(platforms)]]
            branches = [walk(branch, visit, weight, inside) for branch in run]
            heaviest: list[T] = max(branches, key=weight)
            found += heaviest
        else:
            if name == "while" or (name == "scan" and loop_symbol(inside.in_loop, "")):
                inside = replace(inside, per=nested(site.per, loop_symbol(inside.in_loop)), in_loop="")
            elif name == "scan":
                inside = replace(inside, times=site.times * eqn.params["length"])
            elif name == "pallas_call":
                inside = replace(inside, times=site.times * math.prod(eqn.params["grid_mapping"].grid))
            for body in inner:
                found += walk(body, visit, weight, inside)
    return found


def says_its_cost(eqn: JaxprEqn) -> bool:
    """Whether it is a kernel that says what it costs: what its body costs depends on data, and no walk could tell."""
    return eqn.primitive.name == "pallas_call" and eqn.params["cost_estimate"] is not None


def _of_accelerators(platforms: Sequence[Sequence[str] | None]) -> int:
    """The first branch for a platform that is no CPU; None is for all that no other branch is for."""
    return next((index for index, names in enumerate(platforms) if names is None or "cpu" not in names), 0)


def scopes_of(eqn: JaxprEqn, around: str) -> str:
    """The full path of an equation's scopes, given that of the equation around its jaxpr."""
    return "/".join(filter(None, (around, str(eqn.source_info.name_stack))))


def equations(jaxpr: Jaxpr | ClosedJaxpr) -> list[JaxprEqn]:
    """The equations of an open or a closed jaxpr."""
    equations: list[JaxprEqn] = getattr(jaxpr, "jaxpr", jaxpr).eqns
    return equations


def array_type(operand: Var | Literal) -> ShapedArray:
    """Shape and dtype of what an equation takes or gives; local ones inside `shard_map`."""
    return cast(ShapedArray, operand.aval)


def inner_jaxprs(eqn: JaxprEqn) -> Iterator[Jaxpr | ClosedJaxpr]:
    """The jaxprs that an equation runs, in the order of its parameters."""
    for parameter in eqn.params.values():
        for value in parameter if isinstance(parameter, (tuple, list)) else (parameter,):
            if isinstance(value, (Jaxpr, ClosedJaxpr)):
                yield value
