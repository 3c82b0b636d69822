"""Lines through measured times: alpha and beta come back, also from noise, outliers and two algorithms."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.calibrate.fit import Line, fit_lines
from jaxpar.links import Fit

SIZES = [2.0**power for power in range(6, 25, 2)]

ALPHA = st.floats(1e-7, 1e-3)
BANDWIDTH = st.floats(1e8, 1e12)


def predicted(lines: tuple[Line, ...], size: float) -> float:
    return Fit("all_reduce", 2, "inside", lines).seconds(size, 2)


@settings(max_examples=25)
@given(ALPHA, BANDWIDTH)
def test_a_line_comes_back_exactly(alpha: float, bandwidth: float) -> None:
    lines, error = fit_lines(SIZES, [alpha + size / bandwidth for size in SIZES])
    assert lines[0] == pytest.approx((alpha, 1 / bandwidth), rel=1e-6)
    assert len(lines) == 1 and error < 1e-6


@settings(max_examples=25)
@given(ALPHA, BANDWIDTH, st.integers(0, 2**32 - 1))
def test_a_line_comes_back_from_noise_of_five_percent(alpha: float, bandwidth: float, seed: int) -> None:
    noise = np.random.default_rng(seed).uniform(0.95, 1.05, len(SIZES))
    lines, error = fit_lines(
        SIZES, [(alpha + size / bandwidth) * part for size, part in zip(SIZES, noise, strict=True)]
    )
    assert error < 0.05
    for size in SIZES:
        assert predicted(lines, size) == pytest.approx(alpha + size / bandwidth, rel=0.1)


@settings(max_examples=25)
@given(ALPHA, BANDWIDTH, st.integers(0, len(SIZES) - 1), st.floats(3, 30))
def test_one_time_that_is_far_off_moves_little(alpha: float, bandwidth: float, which: int, factor: float) -> None:
    times = [alpha + size / bandwidth for size in SIZES]
    disturbed = [time * (factor if place == which else 1) for place, time in enumerate(times)]
    lines, _ = fit_lines(SIZES, disturbed)
    assert sorted(predicted(lines, size) / time for size, time in zip(SIZES, times, strict=True))[2:-2] == (
        pytest.approx([1] * (len(SIZES) - 4), rel=0.05)
    )


def test_two_algorithms_are_two_lines() -> None:
    small, large = (3.25e-6, 7 / 292e9), (30e-6, 1.75 / 450e9)
    times = [min(alpha + beta * size for alpha, beta in (small, large)) for size in SIZES]
    lines, error = fit_lines(SIZES, times)
    assert lines == (pytest.approx(small, rel=1e-6), pytest.approx(large, rel=1e-6))
    assert error < 1e-6


def test_neither_part_is_below_zero() -> None:
    assert fit_lines([1e3, 1e6], [1e-6, 2e-3]) == (((0.0, pytest.approx(1.2e-9, rel=1)),), pytest.approx(0.5, abs=0.5))
    ((alpha, beta),), _ = fit_lines([1e3, 1e6], [2e-3, 1e-3])
    assert beta == 0 and 1e-3 <= alpha <= 2e-3


def test_one_size_is_a_latency() -> None:
    assert fit_lines([64], [2e-6]) == (((pytest.approx(2e-6), 0.0),), pytest.approx(0))
