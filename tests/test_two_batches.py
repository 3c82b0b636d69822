"""Two half batches in one program: where a step is cut, what each half holds, and that the answers are the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle_checks import assert_logits, assert_tokens, checked_loads
from oracle_data import load_oracle
from sample_models import oracle_runner

from jaxpar.engine.lanes import assign
from jaxpar.engine.prefill import cuts_of, prefill_steps, split_in_two
from jaxpar.engine.sizes import lanes_of, stored_by_rank
from jaxpar.layout import LAYOUTS, deal
from jaxpar.mesh import MeshSpec
from jaxpar.plan import Plan

# Where a step is cut


@pytest.mark.parametrize(
    ("lengths", "cut"),
    [
        ([42], (0, 21)),
        ([42, 999], (1, 520)),
        ([999, 42], (0, 520)),
        ([498, 502], (1, 498)),
        ([4096] * 4, (2, 8192)),
        ([1, 1, 1, 1, 99999], (4, 50001)),
        ([1], (0, 0)),
        ([], (0, 0)),
    ],
)
def test_a_prefill_is_cut_between_requests_if_that_is_even_within_2_percent_else_at_the_middle_token(
    lengths: list[int], cut: tuple[int, int]
) -> None:
    assert split_in_two(lengths) == cut


lengths_of_prompts = st.lists(st.integers(1, 40), min_size=1, max_size=9)
plans = st.builds(
    Plan,
    st.builds(MeshSpec, dp=st.integers(1, 3), cp=st.integers(1, 3)),
    layout=st.sampled_from(LAYOUTS),
    chunk=st.integers(1, 30),
    two_batch_overlap=st.booleans(),
)


@given(lengths_of_prompts, plans)
def test_every_token_is_in_one_part_and_a_part_fits_its_lane_and_comes_after_what_it_sees(
    lengths: list[int], plan: Plan
) -> None:
    taken, stored = [0] * len(lengths), np.zeros((len(lengths), plan.mesh.cp), int)
    for step in prefill_steps(lengths, plan):
        assert len({part.row for part in step.parts}) == len(step.parts)
        for part in step.parts:
            # Parts of a request follow one another, those of the first half first.
            assert part.first == taken[part.request]
            assert part.row // step.lanes == part.request % plan.mesh.dp
            dealt = [len(tokens) for tokens in deal(plan.layout, part.first, part.size, plan.mesh.cp)]
            assert 0 < max(dealt) <= step.tokens
            taken[part.request] += part.size
            stored[part.request] += dealt
        assert taken == [min(length, step.offset + step.size) for length in lengths]
    for length, cuts, on_rank in zip(lengths, cuts_of(lengths, plan), stored, strict=True):
        assert stored_by_rank(length, length, plan, cuts).tolist() == on_rank.tolist()


@given(lengths_of_prompts, plans)
def test_the_halves_of_a_replica_have_the_tokens_of_each_side_of_the_cut(lengths: list[int], plan: Plan) -> None:
    plan = replace(plan, two_batch_overlap=True)
    for step in prefill_steps(lengths, plan):
        half = step.lanes // 2
        sides = np.zeros((plan.mesh.dp, 2), int)
        for part in step.parts:
            sides[divmod(part.row // half, 2)] += part.size
        for replica, counted in enumerate(sides):
            counts = [min(max(length - step.offset, 0), step.size) for length in lengths[replica :: plan.mesh.dp]]
            _, token = split_in_two(counts)
            assert counted.tolist() == [token, sum(counts) - token]


def test_half_of_what_one_request_or_even_requests_take_is_each_half_without_padding() -> None:
    plan = Plan(chunk=512, two_batch_overlap=True)
    sizes = [[(step.lanes, step.tokens) for step in prefill_steps([512] * count, plan)] for count in (1, 2, 4, 3)]
    # Of three the second is cut: two lanes in either half.
    assert sizes == [[(2, 256)], [(2, 512)], [(4, 512)], [(4, 512)]]


@given(st.integers(1, 40), st.integers(1, 4))
def test_decode_has_the_first_half_of_a_replica_s_requests_in_its_first_half_of_lanes(count: int, dp: int) -> None:
    plan = Plan(MeshSpec(dp=dp), two_batch_overlap=True)
    lanes = assign([1] * count, plan)
    local = lanes.total // dp
    assert local == lanes_of(count, plan)
    assert local == 1 or local % 2 == 0
    assert len(set(lanes.lane)) == count
    for replica in range(dp):
        mine = [lane - replica * local for lane in lanes.lane[replica::dp]]
        if local > 1:
            assert sum(lane < local // 2 for lane in mine) == len(mine) // 2
        assert mine == sorted(mine)
        assert all(0 <= lane < local for lane in mine)


# Answers

OVER_CP: dict[str, Any] = {"chunk": 10, "layout": "zigzag", "two_batch_overlap": True}
MOVING: dict[str, Any] = {
    "moe_dispatch": "all_to_all",
    "single_batch_overlap": 2,
    "expert_slots": 10,
    "rebalance_every": 2,
    "two_batch_overlap": True,
}
TOKENS: list[Any] = [
    ("qwen3_moe", "dp=2,ep=2,tp=2", MOVING),
    ("mistral", "cp=2", OVER_CP),
    pytest.param(
        "gpt_oss", "dp=2,ep=2,tp=2", {"moe_dispatch": "standard", "sequence_parallel": True}, marks=pytest.mark.full
    ),
    pytest.param(
        "deepseek_v3",
        "dp=2,ep=2,cp=2",
        {"moe_dispatch": "two_level", "devices_per_node": 4, "experts_over": "dp,ep", "decode_overlap": 2},
        marks=pytest.mark.full,
    ),
]


@pytest.mark.usefixtures("unwritten_pages_are_nan")
@pytest.mark.parametrize(("name", "mesh", "plan"), TOKENS)
def test_every_rank_has_the_tokens_of_transformers_in_two_batches(name: str, mesh: str, plan: dict[str, Any]) -> None:
    oracle, runner = load_oracle(name), oracle_runner(name, mesh, page_size=5, **{**plan, "two_batch_overlap": True})
    assert oracle.margin > 0.01
    assert_tokens(runner, oracle.prompts, oracle.greedy)
    assert runner.balancer is None or runner.balancer.moved


def test_both_halves_count_in_the_loads_of_experts() -> None:
    oracle = load_oracle("qwen3_moe")
    in_halves, reference = (
        checked_loads(oracle_runner("qwen3_moe", mesh, page_size=5, **plan), oracle.prompts, oracle.greedy)
        for mesh, plan in (("dp=2,ep=2,tp=2", MOVING), ("tp=1", {}))
    )
    for of_phase, expected in zip(in_halves, reference, strict=True):
        np.testing.assert_array_equal(of_phase, expected)


@pytest.mark.usefixtures("unwritten_pages_are_nan")
def test_every_rank_has_the_logits_of_transformers_also_of_a_request_that_is_in_both_halves() -> None:
    oracle, runner = load_oracle("mistral"), oracle_runner("mistral", "cp=2", page_size=5, **OVER_CP)
    assert any(cuts_of([len(prompt) for prompt in oracle.prompts], runner.plan))
    assert_logits(runner, oracle.prompts, oracle.logits)


@pytest.mark.usefixtures("unwritten_pages_are_nan")
def test_a_single_request_of_a_single_token_is_one_half_and_then_a_step_that_has_no_halves() -> None:
    oracle, runner = load_oracle("mistral"), oracle_runner("mistral", "cp=2", page_size=5, **OVER_CP)
    shortest = min(range(len(oracle.prompts)), key=lambda i: len(oracle.prompts[i]))
    assert len(oracle.prompts[shortest]) == 1
    assert_tokens(runner, [oracle.prompts[shortest]], [oracle.greedy[shortest]])
