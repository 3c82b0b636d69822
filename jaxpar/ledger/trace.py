"""The traced ledger: the collectives that a program's jaxpr holds, with the bytes that each sends.

It counts what the program says, before XLA sees it: axis names, local shapes, loops multiplied out. Casts between
replicated and varying types (`pvary`, `pcast`) send nothing and are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jaxpar.ledger.scope import scope_of
from jaxpar.ledger.traffic import SENT_BYTES, Traffic, merge
from jaxpar.ledger.walk import Site, array_type, equations, inner_jaxprs, walk

_COLLECTIVES = {
    "psum": "all_reduce",
    "psum_invariant": "all_reduce",
    "pmax": "all_reduce",
    "pmin": "all_reduce",
    "reduce_scatter": "reduce_scatter",
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "all_to_all": "all_to_all",
    "ragged_all_to_all": "ragged_all_to_all",
    "ppermute": "ppermute",
    "pbroadcast": "broadcast",
}


def trace_traffic(jaxpr: Jaxpr | ClosedJaxpr, sizes: Mapping[str, int]) -> list[Traffic]:
    """The rows of every collective of a program, as `jax.make_jaxpr` gives it, that spans more than one rank.

    `sizes` are the mesh's axes, outermost first. Rows outside every "<sublayer>:<strategy>" scope are "unscoped". Of a
    `cond` the branch that sends most counts; a loop with an unknown trip count is counted per iteration
    (`Traffic.per`). Raises NotImplementedError for a primitive that communicates in a way unknown to the ledger.
    """

    def visit(eqn: JaxprEqn, site: Site) -> list[Traffic]:
        if collective_of(eqn) is None:
            return []
        return _rows(eqn, site, sizes)

    return merge(walk(jaxpr, visit, lambda rows: sum(row.sent_bytes for row in rows)))


def count_collectives(jaxpr: Jaxpr | ClosedJaxpr) -> int:
    """How many collectives a program's text holds, also those over axes of size 1, which XLA:CPU does not remove."""
    return sum(
        sum(map(count_collectives, inner)) if (inner := list(inner_jaxprs(eqn))) else collective_of(eqn) is not None
        for eqn in equations(jaxpr)
    )


def collective_of(eqn: JaxprEqn) -> str | None:
    """The ledger's word for what an equation sends over named axes, or None if it sends nothing.

    Raises NotImplementedError if it does something over named axes that the ledger does not know.
    """
    name = eqn.primitive.name
    if name in _COLLECTIVES:
        return _COLLECTIVES[name] if named_axes(eqn) else None
    if name != "axis_index" and any(type(effect).__name__ == "NamedAxisEffect" for effect in eqn.effects):
        raise NotImplementedError(f"the ledger cannot count what {name} sends; add it to jaxpar/ledger/trace.py")
    return None


def named_axes(eqn: JaxprEqn) -> tuple[str, ...]:
    """The mesh axes of a collective. Those of a `vmap` are numbers, which stay within a rank."""
    axes = eqn.params["axes"] if "axes" in eqn.params else eqn.params["axis_name"]
    return tuple(axis for axis in (axes if isinstance(axes, tuple) else (axes,)) if isinstance(axis, str))


def _rows(eqn: JaxprEqn, site: Site, sizes: Mapping[str, int]) -> list[Traffic]:
    """One row for each operand that an equation sends, none if its groups are single ranks."""
    collective = _COLLECTIVES[eqn.primitive.name]
    named = named_axes(eqn)
    axes = tuple(axis for axis, size in sizes.items() if axis in named and size > 1)
    groups = eqn.params.get("axis_index_groups")
    ranks = max(map(len, groups)) if groups else math.prod(sizes[axis] for axis in named)
    if ranks == 1 or (collective == "ppermute" and all(source == target for source, target in eqn.params["perm"])):
        return []
    sizes_of = [array_type(operand).size * array_type(operand).dtype.itemsize for operand in eqn.invars]
    # The first operand of a ragged all-to-all is what a rank sends at most, the second what it gets at most, and the
    # others say where its pieces are.
    messages = [min(sizes_of[:2])] if collective == "ragged_all_to_all" else sizes_of
    sublayer, strategy = scope_of(site.scopes)
    rows = []
    for message in messages:
        sent = site.times * SENT_BYTES[collective](message, ranks)
        of_groups = ranks if groups else 0
        rows.append(Traffic(sublayer, strategy, collective, axes, site.times, message, sent, site.per, of_groups))
    return rows
