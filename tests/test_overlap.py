"""In parts, decode attention leaves a backend free to send one part while it computes the next."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.extend.core import JaxprEqn, Var
from test_registry import CONFIG

from jaxpar.attention.decode.overlap import overlap_parts
from jaxpar.devices import abstract_mesh
from jaxpar.ledger.walk import equations, inner_jaxprs
from jaxpar.mesh import MeshSpec
from jaxpar.plan import Plan
from jaxpar.program import Programs
from jaxpar.strategies import Step

EXCHANGES = {"ag_rs": "reduce_scatter", "a2a": "all_to_all", "q_replicated": "all_to_all", "helix": "all_to_all"}


def body(plan: Plan) -> list[JaxprEqn]:
    """The equations of a decode step of one layer inside `shard_map`, in order."""
    config = replace(CONFIG, num_hidden_layers=1, windows=(None,))
    step = Step(config, plan, "decode", lanes=5, tokens=1, keys=16)
    programs = Programs(config, plan, abstract_mesh(plan.mesh))
    (mapped,) = equations(jax.make_jaxpr(programs.spmd("decode"))(*programs.abstract_arguments(step, pages=9)))
    return equations(next(inner_jaxprs(mapped)))


def ancestors(eqns: list[JaxprEqn]) -> list[frozenset[int]]:
    """For each equation the numbers of all equations that it depends on."""
    made: dict[Any, int] = {}
    found: list[frozenset[int]] = []
    for number, eqn in enumerate(eqns):
        direct = {made[x] for x in eqn.invars if isinstance(x, Var) and x in made}
        found.append(frozenset(direct).union(*(found[one] for one in direct)))
        made |= dict.fromkeys(eqn.outvars, number)
    return found


@pytest.mark.parametrize(("strategy", "exchange"), EXCHANGES.items())
@pytest.mark.parametrize("parts", [2, 3])
def test_no_part_of_decode_attention_depends_on_another(strategy: str, exchange: str, parts: int) -> None:
    plan = Plan(MeshSpec(cp=2, tp=2), page_size=4, decode_attention=strategy, decode_overlap=parts)
    eqns = body(plan)
    before, scope = ancestors(eqns), f"decode_attention:{strategy}"
    inside = [number for number, eqn in enumerate(eqns) if scope in str(eqn.source_info.name_stack)]
    products = {number for number in inside if eqns[number].primitive.name == "dot_general"}
    sent = [number for number in inside if eqns[number].primitive.name == exchange]
    assert len(sent) == parts
    assert len(products) == 2 * parts
    # Each exchange waits for the two products of its own part, and no product waits for an exchange.
    assert sorted(len(products & before[number]) for number in sent) == [2] * parts
    assert set.union(*(products & before[number] for number in sent)) == products
    assert all(not before[number] & set(sent) for number in products)


@given(st.integers(1, 100), st.integers(1, 20))
def test_parts_are_as_even_as_can_be_and_hold_every_lane(lanes: int, parts: int) -> None:
    each = overlap_parts(lanes, parts)
    assert sum(each) == lanes
    assert len(each) == min(parts, lanes)
    assert max(each) - min(each) <= 1
