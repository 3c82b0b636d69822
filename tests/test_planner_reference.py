"""The reference cases: bounds, weights and times that another planner publishes, and where that one is wrong."""

from __future__ import annotations

import pytest

from jaxpar.planner.assumptions import Assumptions
from jaxpar.planner.memory import memory_of
from jaxpar.planner.reference import CASES, WORKLOAD, Case, unhindered
from jaxpar.planner.timing import cache_bytes, decode_time, prefill_time
from jaxpar.presets import load_preset

GIB = 2**30
BY_NAME = {case.name: case for case in CASES}
H200 = load_preset("h200-calibrated-8").device

one_node = pytest.mark.parametrize("case", [case for case in CASES if case.name != "R4"], ids=lambda case: case.name)


@one_node
def test_bounds_are_within_2_percent_of_the_peers_or_of_what_is_right_where_it_leaves_things_out(case: Case) -> None:
    prefill, decode = case.bounds()
    assert decode == pytest.approx(case.right.decode, rel=0.02)
    if case.right.prefill:
        assert prefill == pytest.approx(case.right.prefill, rel=0.02)


@one_node
def test_times_with_the_calibrated_h200_are_within_15_percent_of_public_tables(case: Case) -> None:
    prefill, decode = case.times()
    assert decode == pytest.approx(case.table.decode, rel=0.15)
    if case.table.prefill:
        assert prefill == pytest.approx(case.table.prefill, rel=0.15)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_weights_of_a_device_are_exact_to_the_hundredth_of_a_gib(case: Case) -> None:
    memory = memory_of(case.config, case.sums, H200, WORKLOAD, Assumptions(**case.types), case.batch)
    assert round(memory.weight_bytes / GIB, 2) == case.right.weights


def test_the_cache_of_64_requests_of_llama_70b_is_10_99_gib_of_each_of_8_devices() -> None:
    case = BY_NAME["R1"]
    assert round(64 * cache_bytes(case.config, 4500, Assumptions(), "bfloat16") / 8 / GIB, 2) == 10.99


def test_two_nodes_sum_by_levels_so_that_tp_16_prefills_32_prompts_faster_than_tp_8_and_not_4_times_slower() -> None:
    eight, sixteen = BY_NAME["R1"].sums, BY_NAME["R4"].sums
    config, device = BY_NAME["R4"].config, unhindered(H200)
    times = [prefill_time(config, plan, H200, WORKLOAD, Assumptions(), 32).prefill for plan in (eight, sixteen)]
    assert times[0] == pytest.approx(4.76, rel=0.15)  # the table's seconds for tp 8
    assert 0.5 * times[0] < times[1] < 1.3 * times[0]  # the peer has 14.1 s for tp 16
    step = decode_time(config, sixteen, device, WORKLOAD, Assumptions(), 32).step
    message, layers = 32 * config.hidden_size * 2, 160
    by_levels = 2 * 7 / 8 * message / 450e9 + 2 * 1 / 2 * message / 8 / 50e9
    of_layers = sum(part.sent for part in step.parts if part.name in ("attention", "ffn"))
    assert of_layers == pytest.approx(layers * by_levels, rel=1e-3)
