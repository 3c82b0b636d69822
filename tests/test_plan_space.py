"""Which plans are looked at: all that use exactly the devices, and few enough of them to answer in seconds."""

from __future__ import annotations

import math

import pytest
from planned import config_of, found, question

from jaxpar.mesh import MeshSpec
from jaxpar.plan import Plan
from jaxpar.planner.estimate import Estimate
from jaxpar.planner.evaluate import Evaluator
from jaxpar.planner.pareto import front
from jaxpar.planner.pools import best_split
from jaxpar.planner.serving import apart, together
from jaxpar.planner.shares import contributions
from jaxpar.planner.space import base_plans, changed, factors, neighbours, options, problem, sparse


def plans_of(model: str, devices: int) -> list[Plan]:
    return base_plans(config_of(model), devices, 4500, 8, "bfloat16", 4000)


def test_all_ways_to_factor_a_number() -> None:
    assert [*factors(6, 2)] == [(1, 6), (2, 3), (3, 2), (6, 1)]
    assert len([*factors(1024, 5)]) == math.comb(14, 4)


@pytest.mark.parametrize(("model", "devices"), [("llama-3-70b", 24), ("deepseek-v3", 16), ("tiny-moe", 3)])
def test_every_plan_uses_exactly_the_devices_and_runs(model: str, devices: int) -> None:
    plans = plans_of(model, devices)
    assert len({*plans}) == len(plans) > 3
    assert {plan.mesh.size for plan in plans} == {devices}
    assert [problem(config_of(model), plan) for plan in plans if problem(config_of(model), plan)] == []


def test_experts_are_split_over_ep_and_with_cp_and_tp_or_without() -> None:
    over = {plan.experts_over for plan in plans_of("deepseek-v3", 16) if plan.mesh == MeshSpec(ep=4, cp=2, tp=2)}
    assert over == {("ep",), ("ep", "cp"), ("ep", "tp"), ("ep", "cp", "tp")}


def test_every_option_that_is_tried_is_a_plan_that_runs() -> None:
    config = config_of("qwen3-235b-a22b")
    plan = Plan(MeshSpec(dp=2, ep=2, cp=2, tp=2), dtype="bfloat16", devices_per_node=4, chunk=2048)
    tried = [other for fields in options(config, plan) if (other := changed(config, plan, fields)) is not None]
    assert {"two_level", "ragged", "all_to_all", "standard"} <= {other.moe_dispatch for other in tried}
    assert {"ring", "ulysses", "usp", "ring_q"} <= {other.prefill_attention for other in tried}
    assert {other.expert_slots for other in tried} == {0, 130, 160}
    assert not {"int8", "fp8", "fixed_order"} & {other.all_reduce for other in tried}


def test_a_thousand_devices_are_searched_by_few_estimates() -> None:
    plans = plans_of("deepseek-v3", 1024)
    coarse = sparse(plans, 8)
    assert len(plans) > 2000 and 100 < len(coarse) < 400
    assert {plan.mesh.tp for plan in coarse} >= {1, 4, 8} and {plan.mesh.pp for plan in coarse} >= {1, 4, 16}
    soonest = found(model="llama-3.1-8b", cluster="h200-8x8", objective="latency")
    assert soonest.space > 60 and soonest.best[0].devices == 64
    assert soonest.steps < 1000  # a millisecond or two each


def test_neighbours_move_one_factor() -> None:
    near = {str(mesh) for mesh in neighbours(MeshSpec(dp=2, tp=3))}
    assert near == {
        "dp=2,tp=3", "tp=6", "pp=2,tp=3", "ep=2,tp=3", "cp=2,tp=3",
        "dp=6", "pp=3,dp=2", "dp=2,ep=3", "dp=2,cp=3",
    }  # fmt: skip


def test_a_replica_serves_in_cycles() -> None:
    served = together(prefill=0.2, interval=0.2, decode=0.02, output=101, lanes=10, requests=40)
    assert served.rate == pytest.approx(40 / (10 * 0.2 + 100 * 0.02))
    assert served.tpot == pytest.approx(0.02 + 9 * 0.2 / 100)
    others = 9 * 0.2 / 4.0
    assert served.first.queue == pytest.approx(others * 0.2 / (2 * (1 - others)) + 0.01)
    alone = together(0.2, 0.2, 0.02, 101, lanes=1, requests=1)
    assert (alone.first.queue, alone.tpot) == (0.0, 0.02)


def test_a_pool_that_cannot_keep_up_is_none() -> None:
    assert apart(0.2, 0.2, 1, 0.0, 0.02, 101, requests=10, most_busy=0.9) is None
    served = apart(0.2, 0.2, 1, 0.01, 0.02, 101, requests=5, most_busy=0.9)
    assert served is not None and served.prefilling == pytest.approx(5 / 2.01 * 0.2)
    md1 = served.prefilling * 0.2 / (2 * (1 - served.prefilling))
    assert served.first.queue == pytest.approx(md1)  # one server: exact


def test_pools_take_all_devices_and_keep_up() -> None:
    evaluator = Evaluator(question(cluster="h200-8x2"))
    one = best_split(evaluator, Plan(MeshSpec(tp=2), dtype="bfloat16"), Plan(MeshSpec(tp=4), dtype="bfloat16"))
    assert one is not None and one.devices == 16 and one.served.prefilling <= 0.9
    assert [pool.plan.mesh.tp for pool in one.pools] == [2, 4]


@pytest.mark.parametrize("objective", ["throughput", "latency"])
def test_contributions_add_up_to_what_is_minimised(objective: str) -> None:
    seen = [one for one in found(objective=objective).best if one.fits]
    for one in seen[:4]:
        whole = one.latency if objective == "latency" else one.device_seconds
        assert sum(contributions(one, objective).values()) == pytest.approx(whole, rel=0.02)


def test_nothing_beats_the_front_in_both() -> None:
    seen: list[Estimate] = [one for one in found().seen if one.fits]
    best = front(seen)
    for one in best:
        assert not any(
            other.tokens_per_user > one.tokens_per_user and other.tokens_per_device > one.tokens_per_device
            for other in seen
        )
    assert len(best) > 3


def test_requests_of_one_token_wait_for_prefills_alone_and_have_no_time_between_tokens_of_others() -> None:
    served = together(prefill=0.5, interval=0.5, decode=0.01, output=1, lanes=10, requests=10)
    assert served.tpot == 0.01
    assert served.first.queue == pytest.approx(9 * 0.5 / 2)
    assert served.rate == pytest.approx(1 / 0.5)
