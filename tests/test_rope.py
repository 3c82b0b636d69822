"""Rotary angles: what a rotation keeps, and which waves each kind of stretching stretches."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.checkpoint.config import RopeConfig
from jaxpar.nn.rope import angles, frequencies, rotate

SIZE = 16
DEFAULT = RopeConfig(theta=1e4)
LLAMA3 = RopeConfig(
    "llama3", 5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)
YARN = RopeConfig("yarn", 1e4, factor=4.0, original_max_position_embeddings=4096)


@jax.jit
def turned(x: jax.Array, position: jax.Array) -> jax.Array:
    """One head [SIZE] at a position."""
    return rotate(x[None, None, :], *angles(position[None], DEFAULT, SIZE))[0, 0]


def rates(rope: RopeConfig, size: int = 128) -> np.ndarray:
    return frequencies(rope, size)[0]


def factor_of(**fields: Any) -> float:
    return frequencies(RopeConfig("yarn", 1e4, original_max_position_embeddings=4096, **fields), 128)[1]


def test_pair_i_of_d_turns_by_theta_to_the_minus_2i_over_d_a_position() -> None:
    found, scale = frequencies(DEFAULT, SIZE)
    np.testing.assert_allclose(found, [1e4 ** (-2 * i / SIZE) for i in range(SIZE // 2)], rtol=1e-6)
    assert scale == 1.0


def test_dimension_i_turns_with_dimension_i_plus_half() -> None:
    x = jnp.zeros(SIZE).at[3].set(1.0)
    angle = 7 * frequencies(DEFAULT, SIZE)[0][3]
    expected = np.zeros(SIZE)
    expected[[3, 3 + SIZE // 2]] = math.cos(angle), math.sin(angle)
    np.testing.assert_allclose(turned(x, jnp.int32(7)), expected, atol=1e-6)


def test_position_0_turns_nothing() -> None:
    x = jnp.arange(SIZE, dtype=jnp.float32)
    np.testing.assert_array_equal(turned(x, jnp.int32(0)), x)


@given(st.integers(0, 2000), st.integers(0, 2000), st.integers(0, 2000))
def test_a_score_depends_on_the_distance_alone(query: int, key: int, shift: int) -> None:
    q, k = np.random.default_rng(0).standard_normal((2, SIZE)).astype(np.float32)

    def score(m: int, n: int) -> float:
        return float(turned(jnp.asarray(q), jnp.int32(m)) @ turned(jnp.asarray(k), jnp.int32(n)))

    assert score(query, key) == pytest.approx(score(query + shift, key + shift), abs=2e-3)


@given(st.integers(0, 100_000))
def test_a_rotation_keeps_lengths(position: int) -> None:
    x = jnp.arange(1, SIZE + 1, dtype=jnp.float32)
    assert float(jnp.linalg.norm(turned(x, jnp.int32(position)))) == pytest.approx(float(jnp.linalg.norm(x)), rel=1e-5)


def test_a_rotation_in_bfloat16_is_one_rounding_from_the_exact_one() -> None:
    x = np.random.default_rng(1).standard_normal((5, 2, SIZE)).astype(jnp.bfloat16)
    cos, sin = angles(jnp.arange(5, dtype=jnp.int32) * 1000, DEFAULT, SIZE)
    exact = rotate(jnp.asarray(x, jnp.float32), cos, sin)
    found = rotate(jnp.asarray(x), cos, sin)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, exact.astype(jnp.bfloat16))


def test_linear_scaling_divides_positions_by_the_factor() -> None:
    np.testing.assert_allclose(rates(RopeConfig("linear", 1e4, factor=2.5)), rates(DEFAULT) / 2.5, rtol=1e-6)


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig("linear", 1e4),
        RopeConfig("llama3", 1e4, original_max_position_embeddings=8192),
        RopeConfig("yarn", 1e4, original_max_position_embeddings=4096),
    ],
)
def test_a_factor_of_1_changes_nothing(rope: RopeConfig) -> None:
    np.testing.assert_allclose(rates(rope), rates(DEFAULT), rtol=1e-6)
    assert frequencies(rope, SIZE)[1] == 1.0


def test_llama3_keeps_short_waves_stretches_long_ones_and_blends_between() -> None:
    plain = rates(RopeConfig(theta=5e5))
    ratio, waves = rates(LLAMA3) / plain, 2 * math.pi / plain
    np.testing.assert_allclose(ratio[waves < 8192 / 4], 1.0, rtol=1e-6)
    np.testing.assert_allclose(ratio[waves > 8192 / 1], 1 / 8, rtol=1e-6)
    between = ratio[(waves >= 8192 / 4) & (waves <= 8192)]
    assert between.size
    assert ((between > 1 / 8) & (between < 1)).all()
    assert (np.diff(ratio) <= 1e-6).all()


def test_yarn_keeps_pairs_that_turn_often_and_stretches_those_that_turn_less_than_once() -> None:
    ratio = rates(YARN) / rates(DEFAULT)
    turns = 4096 * rates(DEFAULT) / (2 * math.pi)
    np.testing.assert_allclose(ratio[turns > 32 * 1.2], 1.0, rtol=1e-6)
    np.testing.assert_allclose(ratio[turns < 1 / 1.2], 1 / 4, rtol=1e-6)
    assert (np.diff(ratio) <= 1e-6).all()


def test_yarn_without_truncation_begins_exactly_at_the_pairs_that_turn_beta_times() -> None:
    exact = RopeConfig("yarn", 1e4, factor=4.0, original_max_position_embeddings=4096, truncate=False)
    first = 128 * math.log(4096 / (32 * 2 * math.pi)) / (2 * math.log(1e4))
    last = 128 * math.log(4096 / (1 * 2 * math.pi)) / (2 * math.log(1e4))
    at = np.clip((np.arange(64) - first) / (last - first), 0, 1)
    np.testing.assert_allclose(rates(exact) / rates(DEFAULT), at / 4 + 1 - at, rtol=1e-5)


def test_yarn_scales_cos_and_sin_by_its_temperature() -> None:
    assert factor_of(factor=4.0) == pytest.approx(0.1 * math.log(4) + 1)
    assert factor_of(factor=40.0, mscale=1.0, mscale_all_dim=1.0) == pytest.approx(1.0)
    two, one = (0.1 * weight * math.log(40) + 1 for weight in (2, 1))
    assert factor_of(factor=40.0, mscale=2.0, mscale_all_dim=1.0) == pytest.approx(two / one)
    assert factor_of(factor=4.0, attention_factor=1.5) == 1.5
    cos, sin = angles(jnp.arange(9, dtype=jnp.int32), YARN, 128)
    np.testing.assert_allclose(cos**2 + sin**2, (0.1 * math.log(4) + 1) ** 2, rtol=1e-5)
