"""Every way to dispatch tokens to experts is counted: closed forms are what the programs hold, on any mesh."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from test_registry import CONFIG, jaxpr
from uniform import uniform_control_violations

from jaxpar.checkpoint.config import MoEConfig, MoETensors, RouterConfig
from jaxpar.ledger.flops import trace_flops
from jaxpar.ledger.predict import predict_flops, predict_traffic
from jaxpar.ledger.trace import count_collectives, trace_traffic
from jaxpar.ledger.traffic import compare
from jaxpar.mesh import MeshSpec
from jaxpar.plan import PHASES, Phase, Plan
from jaxpar.registry import STRATEGIES
from jaxpar.strategies import Step

MOE = MoEConfig(
    num_experts=6,
    intermediate_size=10,
    layers=(False, True, True),
    router=RouterConfig(top_k=2),
    tensors=MoETensors("gate", "{expert}.gate", "{expert}.up", "{expert}.down", shared="shared."),
    shared_intermediate_size=14,
)
EXPERTS = replace(CONFIG, moe=MOE, mlp_bias=False)
DISPATCHES = [strategy for strategy in STRATEGIES if strategy.sublayer == "moe_dispatch" and strategy.axes]
PLANS: list[tuple[str, dict[str, Any]]] = [
    ("ep=4", {"devices_per_node": 1}),
    ("ep=2,tp=2", {}),
    ("ep=2,tp=4", {"experts_over": "ep,tp", "sequence_parallel": True, "devices_per_node": 4}),
    ("ep=2,tp=4", {"sequence_parallel": True, "expert_slots": 8}),
    ("dp=2,ep=2,cp=2,tp=2", {"experts_over": "dp,ep,cp,tp", "devices_per_node": 4}),
    ("ep=2,cp=3,tp=2", {"decode_attention": "helix"}),
    ("cp=2,tp=2", {"experts_over": "tp", "decode_attention": "helix", "sequence_parallel": True}),
    ("ep=2,tp=2", {"two_batch_overlap": True}),
    # One slot holds the dense layer of the first stage and the experts of the second.
    ("pp=2,ep=2,tp=2", {"stages": "2,1", "devices_per_node": 2}),
]
# Options of a dispatch, on meshes with nodes.
OPTIONS: list[dict[str, Any]] = [
    {"moe_deduplicate": True},
    {"moe_deduplicate": True, "single_batch_overlap": 2},
    {"moe_capacity": 1.25, "single_batch_overlap": 3},
]


def a_step(mesh: str, fields: dict[str, Any], phase: Phase) -> Step:
    plan = Plan(MeshSpec.parse(mesh), page_size=4, **fields)
    lanes = 4 if plan.two_batch_overlap else 3
    return Step(EXPERTS, plan, phase, lanes, tokens=1 if phase == "decode" else 5, keys=12)


def every_program() -> Iterator[Any]:
    for mesh, fields in PLANS:
        for dispatch in DISPATCHES:
            for options in ({}, *OPTIONS) if "devices_per_node" in fields else ({},):
                every = {**fields, "moe_dispatch": dispatch.name, **options}
                if dispatch.check(a_step(mesh, every, "decode")) is None:
                    name = ",".join(f"{key}={value}" for key, value in every.items())
                    yield from (pytest.param(mesh, every, phase, id=f"{mesh}-{name}-{phase}") for phase in PHASES)


def test_every_dispatch_is_among_the_programs_and_so_are_its_options() -> None:
    plans = [program.values[1] for program in every_program()]
    assert {plan["moe_dispatch"] for plan in plans} == {dispatch.name for dispatch in DISPATCHES}
    assert {plan["moe_dispatch"] for plan in plans if plan.get("moe_deduplicate")} == {
        "all_to_all",
        "ragged",
        "two_level",
    }
    for option in ("moe_capacity", "single_batch_overlap"):
        assert {plan["moe_dispatch"] for plan in plans if plan.get(option)} == {"all_to_all"}


@pytest.mark.parametrize(("mesh", "fields", "phase"), [*every_program()])
def test_predicted_bytes_calls_and_flops_are_the_traced_ones_and_no_rank_parts_ways(
    mesh: str, fields: dict[str, Any], phase: Phase
) -> None:
    assert_counted(a_step(mesh, fields, phase))


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("mesh", "fields"), PLANS)
def test_gathering_without_padding_is_counted_too(mesh: str, fields: dict[str, Any], phase: Phase) -> None:
    assert_counted(replace(a_step(mesh, {**fields, "moe_dispatch": "standard"}, phase), room=3))


@pytest.mark.parametrize("room", [0, 3])
@pytest.mark.parametrize("phase", PHASES)
def test_a_fixed_order_of_sums_and_its_tiles_of_rows_are_counted(phase: Phase, room: int) -> None:
    assert_counted(replace(a_step("ep=2,tp=2", {"all_reduce": "fixed_order"}, phase), room=room))


def assert_counted(step: Step) -> None:
    """Closed forms are what the program holds, and no collective stands where ranks may part ways."""
    program = jaxpr(step)
    assert compare(predict_traffic(step), trace_traffic(program, step.plan.mesh.sizes)) == []
    assert {row.name: row.flops for row in trace_flops(program)} == predict_flops(step)
    assert uniform_control_violations(program, step.plan.mesh.sizes) == []


@pytest.mark.parametrize("phase", PHASES)
def test_one_device_with_experts_holds_no_collective(phase: Phase) -> None:
    assert count_collectives(jaxpr(a_step("tp=1", {}, phase))) == 0
