"""Chunks of a prompt that cost the same: where they end, what they cost, and that the answers stay."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle_checks import assert_logits
from oracle_data import load_oracle
from sample_models import oracle_runner

from jaxpar.assets import model_dir
from jaxpar.checkpoint import ModelConfig, open_checkpoint
from jaxpar.engine.prefill import prefill_steps
from jaxpar.ledger.predict import predict_flops
from jaxpar.mesh import MeshSpec
from jaxpar.pipeline.chunks import equal_cost_ends, level, levelled_ends, rounded, share_of_attention
from jaxpar.pipeline.costs import attention_flops, boundary_bytes, pairs, parity, weight_flops
from jaxpar.pipeline.prompt import in_chunks, three_ways
from jaxpar.plan import Plan
from jaxpar.strategies import Step

shares = st.floats(0, 1)

# What a chunk costs


def part_of_cost(ends: Sequence[float], length: int, a: float) -> np.ndarray:
    """What each chunk costs of a prompt, all of which is 1."""
    u, v = np.array([0.0, *ends[:-1]]) / length, np.array(ends) / length
    return (v - u) * ((1 - a) + a * (u + v))


def test_the_last_of_eight_equal_chunks_costs_1_712_times_the_first_where_attention_is_30_percent() -> None:
    config = config_of("llama-3.1-8b")
    chunk = 2853
    assert share_of_attention(8 * chunk, parity(config, chunk)) == pytest.approx(0.3, abs=1e-4)
    costs = in_chunks(config, Plan(), [chunk] * 8, 8 * chunk).costs[:, 0]
    costs /= costs.mean()
    assert (costs[0], costs[-1]) == (pytest.approx(0.7375, abs=1e-4), pytest.approx(1.2625, abs=1e-4))
    assert costs[-1] / costs[0] == pytest.approx(1.712, abs=5e-4)
    np.testing.assert_allclose(costs, [0.7 + 0.3 * (2 * k + 1) / 8 for k in range(8)], atol=1e-4)


def test_half_of_a_prompt_of_twice_the_parity_is_attention() -> None:
    assert share_of_attention(6000, 3000) == 0.5


# Where they end


@given(st.integers(1, 10**5), st.integers(1, 64), shares)
def test_ends_cut_the_cost_evenly(length: int, m: int, a: float) -> None:
    ends = equal_cost_ends(length, m, a)
    assert ends[-1] == pytest.approx(length)
    np.testing.assert_allclose(part_of_cost(ends, length, a), 1 / m, rtol=1e-6, atol=1e-9)


@given(st.integers(1, 3000), st.integers(1, 64), st.integers(1, 100), shares)
def test_rounded_chunks_have_all_tokens_in_multiples_of_a_32nd(length: int, m: int, chunk: int, a: float) -> None:
    for ends in (equal_cost_ends(length, m, a), levelled_ends(length, m, a)):
        sizes = rounded(ends, length, chunk)
        assert 1 <= len(sizes) <= m
        assert sum(sizes[:-1]) < length <= sum(sizes)
        assert all(size > 0 and size % max(1, chunk // 32) == 0 for size in sizes)


@given(st.integers(1000, 10**6), st.integers(2, 16), shares)
def test_costs_of_whole_chunks_differ_by_what_two_tokens_cost(length: int, m: int, a: float) -> None:
    ends = np.cumsum(rounded(equal_cost_ends(length, m, a), length, 1)).tolist()
    a_token = part_of_cost([length - 1, length], length, a)[1]
    assert np.ptp(part_of_cost(ends, length, a)) <= 2.01 * a_token


def test_without_attention_chunks_are_equal() -> None:
    assert rounded(equal_cost_ends(64, 4, 0), 64, 1) == [16] * 4


def test_eight_chunks_where_attention_is_30_percent() -> None:
    assert rounded(equal_cost_ends(32768, 8, 0.3), 32768, 1) == [5461, 4851, 4408, 4069, 3797, 3573, 3385, 3224]


def test_levelled_chunks_are_of_equal_length_up_to_the_level_and_then_of_equal_attention() -> None:
    length, m, a = 10**6, 40, 0.4
    ends = levelled_ends(length, m, a)
    sizes = np.diff([0.0, *ends])
    flat = sum(end <= level(a) * length for end in ends)
    assert 5 < flat < 35
    np.testing.assert_allclose(sizes[:flat], sizes[0])
    attention = np.diff(np.square([0.0, *ends]))
    np.testing.assert_allclose(attention[flat + 1 :], attention[-1])
    assert ends[-1] == pytest.approx(length)
    assert all(later <= before * (1 + 1e-9) for before, later in itertools.pairwise(sizes))


def drain(ends: Sequence[float], a: float) -> float:
    """What each stage but one waits for in one program: the largest chunk's other work and the largest attention."""
    edges = np.array([0.0, *ends]) / ends[-1]
    return float((1 - a) * max(np.diff(edges)) + a * max(np.diff(edges**2)))


@pytest.mark.parametrize("a", [0.05, 0.3, 0.7, 0.95])
def test_levelled_chunks_wait_least_of_all_in_one_program(a: float) -> None:
    m, length = 32, 10**6
    levelled = levelled_ends(length, m, a)
    least = drain(levelled, a)
    assert least < min(drain([*range(1, m + 1)], a), drain(equal_cost_ends(length, m, a), a))
    rng = np.random.default_rng(0)
    sizes = np.diff([0.0, *levelled])
    for _ in range(200):
        others = np.sort(sizes * rng.uniform(0.9, 1.1, m))[::-1]
        assert drain(np.cumsum(others).tolist(), a) > 0.995 * least


# What they cost a model


def config_of(name: str) -> ModelConfig:
    return open_checkpoint(model_dir(name)).config


@given(st.integers(0, 40), st.integers(0, 40), st.one_of(st.none(), st.integers(1, 30)))
def test_a_query_sees_the_keys_of_its_window(first: int, size: int, window: int | None) -> None:
    assert pairs(first, first + size, window) == sum(min(at + 1, window or at + 1) for at in range(first, first + size))


@pytest.mark.parametrize("name", ["tiny", "llama-3.1-8b", "qwen3-235b-a22b", "deepseek-v3"])
def test_flops_of_weights_and_of_attention_are_those_of_the_ledger(name: str) -> None:
    config, tokens = config_of(name), 512
    plan = Plan(MeshSpec(), dtype="float32", page_size=tokens)
    counted = predict_flops(Step(config, plan, "prefill", lanes=1, tokens=tokens, keys=tokens))
    # The ledger counts every pair, as if no tile could be left out, and all slots of experts.
    ours = tokens * weight_flops(config).sum() + attention_flops(config, 0, tokens).sum() * 2 * tokens / (tokens + 1)
    moe = config.moe
    if moe is not None:
        counted["experts"] = (
            6 * tokens * config.hidden_size * moe.router.top_k * moe.intermediate_size * sum(moe.layers)
        )
    assert sum(counted.values()) - counted["head"] == ours


def test_attention_of_a_dense_model_grows_to_its_share_at_twice_the_parity() -> None:
    config = config_of("llama-3.1-8b")
    at = parity(config, 512)
    assert at == 26624
    for length, share in ((2 * at, 0.5), (32768, share_of_attention(32768, at))):
        attention, others = attention_flops(config, 0, length).sum(), length * weight_flops(config).sum()
        assert attention / (attention + others) == pytest.approx(share, abs=1e-4)


def test_latent_attention_makes_keys_anew_for_each_chunk_so_that_smaller_chunks_have_them_dearer() -> None:
    config = config_of("deepseek-v3")
    assert parity(config, 512) < parity(config, 2048) < parity(config, 10**9)


def test_a_window_on_every_layer_makes_equal_chunks_cost_the_same() -> None:
    assert parity(config_of("mistral-7b"), 512) == 0


def test_a_boundary_of_48_or_36_tokens_of_deepseek_v3_in_bfloat16() -> None:
    assert boundary_bytes(config_of("deepseek-v3"), 48, Plan(dtype="bfloat16")) == 688_128
    assert boundary_bytes(config_of("deepseek-v3"), 36, Plan(dtype="bfloat16")) == 516_096


def test_each_way_has_the_prompt_s_tokens_and_saves_where_it_is_meant_to() -> None:
    config = config_of("llama-3.1-8b")
    at, ways = three_ways(config, Plan(MeshSpec(pp=8), chunk=8192), 131072)
    assert at == parity(config, 8192)
    assert {sum(way.sizes) for way in ways.values()} == {131072}
    for name, schedule in (("equal cost", "free-running"), ("levelled", "one program")):
        times = {way: chunked.schedules[schedule].duration for way, chunked in ways.items()}
        assert min(times, key=lambda way: times[way]) == name
    # All stages are even: equal chunks wait for the last one, and in one program for nothing else.
    equal = ways["equal"]
    assert equal.padded.duration == pytest.approx(equal.free_running.duration)
    assert equal.free_running.duration == pytest.approx(equal.costs[:, 0].sum() + 7 * equal.costs[-1, 0])


# Answers


@pytest.mark.usefixtures("unwritten_pages_are_nan")
def test_every_rank_has_the_logits_of_transformers_in_unequal_chunks() -> None:
    oracle = load_oracle("mistral")
    runner = oracle_runner("mistral", "cp=2", page_size=5, layout="zigzag", chunk=8, chunk_parity=8)
    lengths = [len(prompt) for prompt in oracle.prompts]
    assert [step.size for step in prefill_steps(lengths, runner.plan)] == [8, 6, 5]
    assert_logits(runner, oracle.prompts, oracle.logits)
