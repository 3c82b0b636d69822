"""No collective where ranks may part ways: every rank runs the same collectives in the same order, or the mesh hangs.

A collective under a `cond` or in a `while` is safe only if the predicate is the same on the whole mesh, not merely
within the collective's own groups (on CPU a ppermute of one group waits for the others). JAX does not check it; the
types that `shard_map` keeps under `check_vma=True` say where a value varies, so the jaxpr shows it.
"""

from __future__ import annotations

from collections.abc import Mapping

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jaxpar.collectives.types import varying_axes
from jaxpar.ledger.trace import collective_of, named_axes
from jaxpar.ledger.walk import equations, inner_jaxprs, scopes_of


def uniform_control_violations(jaxpr: Jaxpr | ClosedJaxpr, sizes: Mapping[str, int]) -> list[str]:
    """One line for each collective whose `cond` or `while` ranks may decide differently; empty: every rank runs it.

    `sizes` are the mesh's axes; one of size 1 tells no ranks apart. Under `check_vma=False` nothing is known about a
    predicate, so that a collective which depends on one counts as a violation.
    """
    return _violations(jaxpr, frozenset(axis for axis, size in sizes.items() if size > 1), "", True, ())


def _violations(
    jaxpr: Jaxpr | ClosedJaxpr, axes: frozenset[str], scopes: str, typed: bool, reasons: tuple[str, ...]
) -> list[str]:
    found = []
    for eqn in equations(jaxpr):
        inside = scopes_of(eqn, scopes)
        if reasons and (collective := collective_of(eqn)) and axes.intersection(named_axes(eqn)):
            found.append(f"{collective} over {', '.join(named_axes(eqn))} in {inside or 'no scope'}: {reasons[-1]}")
        inner_typed = eqn.params["check_vma"] if eqn.primitive.name == "shard_map" else typed
        inner_reasons = reasons + _reasons(eqn, axes, typed)
        for inner in inner_jaxprs(eqn):
            found += _violations(inner, axes, inside, inner_typed, inner_reasons)
    return found


def _reasons(eqn: JaxprEqn, axes: frozenset[str], typed: bool) -> tuple[str, ...]:
    """Why ranks may disagree on what an equation runs, in words; empty if they cannot."""
    match eqn.primitive.name:
        case "cond":
            place, predicate = "under a cond whose predicate", eqn.invars[0]
        case "while":
            condition = eqn.params["cond_jaxpr"]
            place, predicate = "in a loop whose trip count", getattr(condition, "jaxpr", condition).outvars[0]
        case _:
            return ()
    if not typed:
        return (f"{place} has no type (check_vma=False): nothing shows that it is the same on every rank",)
    varying = varying_axes(predicate.aval) & axes
    return (f"{place} varies over {', '.join(sorted(varying))}",) if varying else ()
