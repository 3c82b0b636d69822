"""The sizes of steps: what requests are rounded up to, and how much of a request each rank of cp has."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.engine.sizes import bucket, eighths, lanes_of, local_tokens, prefill_chunks, stored_by_rank
from jaxpar.layout import LAYOUTS, deal
from jaxpar.mesh import MeshSpec
from jaxpar.plan import Plan


def a_plan(cp: int, layout: str, interleave: int, chunk: int, parity: int = 0) -> Plan:
    """One of the plans that there are: wide stripes want large chunks."""
    chunk = max(chunk, interleave * cp) if interleave > 1 else chunk
    return Plan(MeshSpec(cp=cp), layout=layout, cp_interleave=interleave, chunk=chunk, chunk_parity=parity)


plans = st.builds(
    a_plan,
    st.integers(1, 7),
    st.sampled_from(LAYOUTS),
    st.integers(1, 9),
    st.integers(1, 40),
    st.sampled_from([0, 1, 50]),
)


def stored_one_by_one(prompt: int, stored: int, plan: Plan) -> list[int]:
    """Tokens on each rank when chunks of the prompt are dealt, and then each decoded token goes to its owner."""
    held, ranks = [0] * plan.mesh.cp, plan.mesh.cp
    prefilled = min(prompt, stored)
    for first, size in prefill_chunks(prompt, plan):
        dealt = deal(plan.layout, first, max(0, min(size, prefilled - first)), ranks, plan.cp_interleave)
        held = [before + len(tokens) for before, tokens in zip(held, dealt, strict=True)]
    for position in range(prefilled, stored):
        held[position // plan.cp_interleave % ranks] += 1
    return held


# Rounded up


@given(st.integers(1, 10**6))
def test_sizes_are_rounded_up_to_a_power_of_two(n: int) -> None:
    size = bucket(n)
    assert size & (size - 1) == 0
    assert n <= size < 2 * n


@given(st.integers(1, 10**6))
def test_a_pool_of_pages_is_at_most_an_eighth_larger_than_what_it_holds(n: int) -> None:
    assert n <= eighths(n) <= n + n // 8


@given(st.integers(1, 10**4), st.integers(1, 4))
def test_lanes_are_as_many_as_requests_up_to_the_next_size(requests: int, dp: int) -> None:
    lanes, each = lanes_of(requests, Plan(MeshSpec(dp=dp))), -(-requests // dp)
    assert each <= lanes < max(2 * each, each + 8)
    assert lanes in (1, 2, 4) or lanes % 8 == 0


# Chunks


@given(st.integers(1, 5000), st.integers(1, 700), st.sampled_from([0, 1, 30, 2000]))
def test_chunks_follow_one_another_and_are_no_more_than_equal_ones(longest: int, chunk: int, parity: int) -> None:
    chunks = [*prefill_chunks(longest, Plan(chunk=chunk, chunk_parity=parity))]
    ends = [first + size for first, size in chunks]
    assert [first for first, _ in chunks] == [0, *ends[:-1]]
    assert chunks[-1][0] < longest <= ends[-1]
    assert len(chunks) <= -(-longest // chunk)
    assert parity or [size for _, size in chunks[:-1]] == [chunk] * (len(chunks) - 1)


def test_levelled_chunks_are_equal_first_and_smaller_after_in_multiples_of_a_32nd() -> None:
    sizes = [size for _, size in prefill_chunks(8192, Plan(chunk=512, chunk_parity=4096))]
    assert sizes == [608, 592, 608, 608, 592, 608, 608, 592, 544, 480, 448, 432, 400, 368, 368, 336]


@given(st.integers(1, 50000), st.integers(1, 700), st.sampled_from([1, 30, 2000, 26624]))
def test_no_levelled_chunk_exceeds_one_before_it_but_for_rounding(longest: int, chunk: int, parity: int) -> None:
    sizes = [size for _, size in prefill_chunks(longest, Plan(chunk=chunk, chunk_parity=parity))]
    assert all(later <= before + 2 * max(1, chunk // 32) for before, later in itertools.pairwise(sizes))


def test_rounding_may_give_a_later_chunk_what_an_earlier_one_lacks() -> None:
    assert [*prefill_chunks(1000, Plan(chunk=512, chunk_parity=26624))] == [(0, 496), (496, 512)]


def test_a_shorter_prompt_is_cut_where_the_longest_beside_it_is() -> None:
    plan = Plan(MeshSpec(cp=2), layout="contiguous", chunk=10, chunk_parity=10)
    assert [*prefill_chunks(12, plan)] == [(0, 7), (7, 5)]
    assert stored_by_rank(8, 8, plan, longest=12).tolist() == [4 + 1, 3]
    assert stored_by_rank(8, 8, plan).tolist() == [4, 4]


# Over cp


@given(st.integers(1, 150), st.integers(0, 200), plans)
def test_each_rank_stores_what_its_chunks_deal_it_and_the_decoded_tokens_it_owns(
    prompt: int, stored: int, plan: Plan
) -> None:
    held = stored_by_rank(prompt, stored, plan)
    assert held.sum() == stored
    assert held.tolist() == stored_one_by_one(prompt, stored, plan)


@given(st.integers(1, 150), st.integers(1, 150), plans)
def test_no_rank_gets_more_of_a_step_than_its_local_tokens(longest: int, prompt: int, plan: Plan) -> None:
    for first, size in prefill_chunks(longest, plan):
        count = max(0, min(prompt - first, size))  # of a request that may have ended before
        dealt = deal(plan.layout, first, count, plan.mesh.cp, plan.cp_interleave)
        assert max(map(len, dealt)) <= local_tokens(size, plan)


@given(st.integers(0, 150), plans)
def test_local_tokens_are_the_fewest_that_serve_a_step_at_every_position(size: int, plan: Plan) -> None:
    starts = range(plan.mesh.cp * plan.cp_interleave)
    most = max(len(held) for at in starts for held in deal(plan.layout, at, size, plan.mesh.cp, plan.cp_interleave))
    assert local_tokens(size, plan) == most


@given(st.integers(1, 150), st.integers(1, 200), st.integers(1, 7), st.integers(1, 9), st.integers(1, 40))
def test_striped_ranks_store_the_same_whatever_was_prefilled(
    prompt: int, stored: int, cp: int, interleave: int, chunk: int
) -> None:
    plan = a_plan(cp, "striped", interleave, chunk)
    np.testing.assert_array_equal(
        stored_by_rank(prompt, stored, plan), [len(held) for held in deal("striped", 0, stored, cp, interleave)]
    )


def test_a_prompt_by_zigzag_and_then_decoded_tokens_by_position() -> None:
    plan = Plan(MeshSpec(cp=4), layout="zigzag", chunk=16)
    # 16 tokens deal 4 each and 3 more 1 each to ranks 0 to 2; 19 to 23 are decoded on ranks 3, 0, 1, 2 and 3.
    assert stored_by_rank(19, 19, plan).tolist() == [5, 5, 5, 4]
    assert stored_by_rank(19, 24, plan).tolist() == [6, 6, 6, 6]
    assert stored_by_rank(19, 10, plan).tolist() == [3, 3, 2, 2]
