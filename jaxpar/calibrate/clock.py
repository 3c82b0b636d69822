"""Seconds of a program that has compiled: the median of several runs, one after another."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

ENOUGH = 0.2
"""Seconds after which a program has run often enough."""

_LEAST, _MOST = 3, 25


def median_seconds(program: Callable[..., Any], *arguments: Any, enough: float = ENOUGH) -> float:
    """Of one run until its results are there; the first run, which warms caches up, does not count."""
    jax.block_until_ready(program(*arguments))
    seconds: list[float] = []
    while len(seconds) < _LEAST or (sum(seconds) < enough and len(seconds) < _MOST):
        start = time.perf_counter()
        jax.block_until_ready(program(*arguments))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
