"""What a program says may overlap: parts, half batches and blocks that do not depend on one another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.extend.core import JaxprEqn, Var
from test_expert_ledger import MOE
from test_registry import CONFIG

from jaxpar.checkpoint.config import ModelConfig
from jaxpar.devices import abstract_mesh
from jaxpar.ledger.trace import collective_of
from jaxpar.ledger.walk import equations, inner_jaxprs, scopes_of
from jaxpar.mesh import MeshSpec
from jaxpar.overlap import even_parts
from jaxpar.plan import PHASES, Phase, Plan
from jaxpar.program import Programs
from jaxpar.strategies import Step

EXCHANGES = {"ag_rs": "reduce_scatter", "a2a": "all_to_all", "q_replicated": "all_to_all", "helix": "all_to_all"}


DENSE = replace(CONFIG, num_hidden_layers=1, windows=(None,))
EXPERTS = replace(
    CONFIG, num_hidden_layers=2, windows=(None, None), mlp_bias=False, moe=replace(MOE, layers=(True,) * 2)
)


def body(plan: Plan, config: ModelConfig = DENSE, phase: Phase = "decode", lanes: int = 5) -> list[JaxprEqn]:
    """The equations of a step inside `shard_map`, in order."""
    step = Step(config, plan, phase, lanes, tokens=1 if phase == "decode" else 5, keys=16)
    programs = Programs(config, plan, abstract_mesh(plan.mesh))
    (mapped,) = equations(jax.make_jaxpr(programs.spmd(phase))(*programs.abstract_arguments(step, pages=9)))
    return equations(next(inner_jaxprs(mapped)))


def inside(eqns: list[JaxprEqn], *scopes: str) -> list[int]:
    """The numbers of the equations in all of these scopes."""
    return [number for number, eqn in enumerate(eqns) if all(scope in scopes_of(eqn, "") for scope in scopes)]


def halves(numbers: list[int]) -> tuple[set[int], set[int]]:
    """What the program says for the first half batch, and then the same for the second."""
    assert numbers
    assert len(numbers) % 2 == 0
    return set(numbers[: len(numbers) // 2]), set(numbers[len(numbers) // 2 :])


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
    numbers = inside(eqns, scope)
    attends = {number for number in numbers if holds(eqns[number], is_product)}
    sent = [number for number in numbers if eqns[number].primitive.name == exchange]
    assert len(sent) == parts
    assert len(attends) == parts
    # Each exchange waits for the attention of its own part, whichever a backend has, and no attention for an exchange.
    assert sorted(len(attends & before[number]) for number in sent) == [1] * parts
    assert set.union(*(attends & before[number] for number in sent)) == attends
    assert all(not before[number] & set(sent) for number in attends)


def needs(before: list[frozenset[int]], some: set[int], others: set[int]) -> bool:
    """Whether any of `some` depends on any of `others`."""
    return any(before[number] & others for number in some)


def holds(eqn: JaxprEqn, what: Callable[[JaxprEqn], object]) -> bool:
    """Whether an equation that holds no others, or one inside it, is such a one."""
    inside = [one for inner in inner_jaxprs(eqn) for one in equations(inner)]
    return any(holds(one, what) for one in inside) if inside else bool(what(eqn))


def is_product(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in ("dot_general", "ragged_dot_general")


@pytest.mark.parametrize("dispatch", ["standard", "all_to_all"])
@pytest.mark.parametrize("phase", PHASES)
def test_half_batches_share_nothing_but_the_keys_that_the_first_has_stored_in_the_layer(
    phase: Phase, dispatch: str
) -> None:
    plan = Plan(MeshSpec(ep=2, cp=2, tp=2), page_size=4, moe_dispatch=dispatch, two_batch_overlap=True)
    eqns = body(plan, EXPERTS, phase, lanes=4)
    before, of_first, of_second = ancestors(eqns), set(), set()
    for layer in ("layer_0", "layer_1"):
        attends = halves(inside(eqns, layer, "attention:psum"))
        passes = halves(inside(eqns, layer, "moe:psum"))
        dispatches = halves(inside(eqns, layer, f"moe_dispatch:{dispatch}"))
        for half in dispatches:
            assert any(holds(eqns[number], collective_of) for number in half)
            assert any(holds(eqns[number], is_product) for number in half)
        # Dispatch, experts and the way back of each, and all else of the layer's FFN, wait for nothing of the other's,
        # and the second's attention not for them. It waits for the first's keys, which lie in the cache.
        assert not needs(before, passes[0], passes[1])
        assert not needs(before, passes[1], passes[0])
        assert not needs(before, attends[1], passes[0])
        assert needs(before, attends[1], attends[0])
        attended, _ = halves(inside(eqns, layer, f"{phase}_attention:"))
        assert not needs(before, attends[1] | passes[1], attended)
        of_first |= attends[0] | passes[0]
        of_second |= attends[1] | passes[1]
    # The first half never waits for the second, in any layer.
    assert not needs(before, of_first, of_second)
    assert not any(holds(eqn, collective_of) for eqn in conditions(eqns))


def conditions(eqns: list[JaxprEqn]) -> list[JaxprEqn]:
    """Every `cond`, however deep it stands."""
    found = [eqn for eqn in eqns if eqn.primitive.name == "cond"]
    return found + [one for eqn in eqns for inner in inner_jaxprs(eqn) for one in conditions(equations(inner))]


@pytest.mark.parametrize("fields", [{"moe_capacity": 1.25}, {}, {"moe_deduplicate": True}], ids=str)
def test_no_block_of_results_waits_for_another_one_s_way_back(fields: dict[str, Any]) -> None:
    plan = Plan(MeshSpec(ep=2), page_size=4, moe_dispatch="all_to_all", single_batch_overlap=3, **fields)
    config = replace(EXPERTS, num_hidden_layers=1, windows=(None,), moe=replace(MOE, layers=(True,)))
    eqns = [eqn for eqn in body(plan, config) if "moe_dispatch:all_to_all" in scopes_of(eqn, "")]
    if "moe_capacity" not in fields:  # a round is the body of a loop
        (loop,) = (eqn for eqn in eqns if eqn.primitive.name == "while")
        eqns = equations(loop.params["body_jaxpr"])
    before = ancestors(eqns)
    back = [number for number, eqn in enumerate(eqns) if eqn.primitive.name == "all_to_all"][-3:]
    products = {number for number, eqn in enumerate(eqns) if holds(eqn, is_product)}
    own = [products & before[number] for number in back]
    assert products
    assert sum(map(len, own)) == len(products) == len(set.union(*own))
    assert len(set(map(len, own))) == 1
    assert not needs(before, products, set(back))


@pytest.mark.parametrize("dispatch", ["standard", "all_to_all"])
def test_experts_that_every_token_passes_wait_for_no_dispatch_and_no_dispatch_for_them(dispatch: str) -> None:
    plan = Plan(MeshSpec(ep=2, tp=2), page_size=4, moe_dispatch=dispatch)
    eqns = body(plan, EXPERTS)
    before = ancestors(eqns)
    for layer in ("layer_0", "layer_1"):
        dispatched = set(inside(eqns, layer, f"moe_dispatch:{dispatch}"))
        products = [number for number in inside(eqns, layer, "moe:psum") if holds(eqns[number], is_product)]
        router, *shared = (number for number in products if number not in dispatched)
        assert needs(before, dispatched, {router})
        assert len(shared) == 2
        assert not needs(before, dispatched, set(shared))
        assert not needs(before, set(shared), dispatched)


@given(st.integers(1, 100), st.integers(1, 20))
def test_parts_are_as_even_as_can_be_and_hold_everything(count: int, parts: int) -> None:
    each = even_parts(count, parts)
    assert sum(each) == count
    assert len(each) == min(parts, count)
    assert max(each) - min(each) <= 1
