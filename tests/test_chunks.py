"""Chunks of a prompt that cost the same: where they end, what they cost, and that the answers stay."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle_checks import assert_logits
from oracle_data import load_oracle
from sample_models import oracle_runner

from jaxpar.engine.prefill import prefill_steps
from jaxpar.errors import PlanError
from jaxpar.pipeline.chunks import (
    chunk_cost,
    equal_chunk_costs,
    equal_cost_chunks,
    equal_cost_ends,
    share_of_attention,
)

shares = st.floats(0, 1)

# What a chunk costs


def test_the_last_of_eight_equal_chunks_costs_1_712_times_the_first_where_attention_is_30_percent() -> None:
    costs = equal_chunk_costs(8, 0.3)
    assert (costs[0], costs[-1]) == (pytest.approx(0.7375), pytest.approx(1.2625))
    assert costs[-1] / costs[0] == pytest.approx(1.712, abs=5e-4)
    assert sum(costs) == pytest.approx(8)


@given(st.integers(1, 50), shares)
def test_costs_of_equal_chunks_are_those_of_their_tokens(m: int, a: float) -> None:
    np.testing.assert_allclose([m * chunk_cost(7 * k, 7, 7 * m, a) for k in range(m)], equal_chunk_costs(m, a))


def test_half_of_a_prompt_of_twice_the_parity_is_attention() -> None:
    assert share_of_attention(6000, 3000) == 0.5


# Where they end


@given(st.integers(1, 10**5), st.integers(1, 64), shares)
def test_ends_cut_the_cost_evenly(length: int, m: int, a: float) -> None:
    ends = equal_cost_ends(length, m, a)
    assert ends[-1] == pytest.approx(length)
    costs = [chunk_cost(first, end - first, length, a) for first, end in zip([0.0, *ends], ends, strict=False)]
    np.testing.assert_allclose(costs, 1 / m, rtol=1e-6, atol=1e-9)


@given(st.integers(1, 3000), st.integers(1, 64), shares)
def test_whole_chunks_have_all_tokens_and_are_smaller_and_smaller(length: int, m: int, a: float) -> None:
    m = min(m, length)
    sizes = equal_cost_chunks(length, m, a)
    assert (len(sizes), sum(sizes)) == (m, length)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] >= 1


@given(st.integers(1000, 10**6), st.integers(2, 16), shares)
def test_costs_of_whole_chunks_differ_by_what_two_tokens_cost(length: int, m: int, a: float) -> None:
    sizes = equal_cost_chunks(length, m, a)
    firsts = np.cumsum([0, *sizes[:-1]])
    costs = [chunk_cost(first, size, length, a) for first, size in zip(firsts.tolist(), sizes, strict=True)]
    assert max(costs) - min(costs) <= 4 * chunk_cost(length - 1, 1, length, a)


def test_without_attention_chunks_are_equal() -> None:
    assert equal_cost_chunks(64, 4, 0) == [16] * 4
    assert equal_cost_chunks(10, 4, 0) == [3, 3, 2, 2]


def test_eight_chunks_where_attention_is_30_percent() -> None:
    assert equal_cost_chunks(32768, 8, 0.3) == [5461, 4851, 4408, 4069, 3797, 3573, 3385, 3224]


@pytest.mark.parametrize(("length", "m", "a"), [(3, 4, 0.5), (3, 0, 0.5), (3, 2, 1.5), (3, 2, -0.1)])
def test_more_chunks_than_tokens_or_a_share_that_cannot_be_is_refused(length: int, m: int, a: float) -> None:
    with pytest.raises(PlanError, match=r"give 1 to 3|it must be from 0 to 1"):
        equal_cost_chunks(length, m, a)


# Answers


@pytest.mark.usefixtures("unwritten_pages_are_nan")
def test_every_rank_has_the_logits_of_transformers_in_unequal_chunks() -> None:
    oracle = load_oracle("mistral")
    runner = oracle_runner("mistral", "cp=2", page_size=5, layout="zigzag", chunk=8, chunk_parity=8)
    lengths = [len(prompt) for prompt in oracle.prompts]
    assert [step.size for step in prefill_steps(lengths, runner.plan)] == [9, 6, 4]
    assert_logits(runner, oracle.prompts, oracle.logits)
