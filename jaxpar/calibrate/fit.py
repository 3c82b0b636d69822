"""From measured times of a collective to alpha and beta: seconds = alpha + beta * bytes, or the least of two lines.

Errors count relative to what was measured, so that a message of 1 KiB weighs as much as one of 4 MiB, and a time that
lies far from all others (somebody else had the machine) weighs little: iteratively reweighted least squares with
Huber's weights (Huber, Robust Statistics, 1981).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Line = tuple[float, float]

_HUBER = 1.345
"""Residuals up to so many standard deviations count in full."""

_PER_LINE = 2
"""Sizes that a line is fitted to at least."""

_GOOD, _WORTH = 0.02, 0.7
"""An error that needs no second line; else one must bring it down to this part of what it is."""


def fit_lines(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[tuple[Line, ...], float]:
    """The (alpha, beta) of one line or two, neither below 0, and the mean part by which they miss what was measured.

    Two are algorithms, of which the backend takes the faster: one for small messages with the smaller alpha, and one
    for large messages with the smaller beta.

    Args:
        sizes: bytes of a message, each given once.
        seconds: what it took, above 0.
    """
    order = np.argsort(np.asarray(sizes, np.float64))
    x, t = np.asarray(sizes, np.float64)[order], np.asarray(seconds, np.float64)[order]
    lines: tuple[Line, ...] = (_line(x, t),)
    error = _error(lines, x, t)
    wanted = _WORTH * error if error > _GOOD else 0.0
    for cut in range(_PER_LINE, len(x) - _PER_LINE + 1):
        small, large = _line(x[:cut], t[:cut]), _line(x[cut:], t[cut:])
        if small[0] < large[0] and small[1] > large[1] and (found := _error((small, large), x, t)) < wanted:
            lines, error, wanted = (small, large), found, found
    return lines, error


def _error(lines: Sequence[Line], x: np.ndarray, t: np.ndarray) -> float:
    fitted = np.min([alpha + beta * x for alpha, beta in lines], axis=0)
    return float(np.mean(np.abs(fitted / t - 1)))


def _line(x: np.ndarray, t: np.ndarray) -> Line:
    weights = np.ones_like(t)
    line = _weighted(x, t, weights)
    for _ in range(20):
        off = np.abs((line[0] + line[1] * x) / t - 1)
        spread = 1.4826 * float(np.median(off))  # the standard deviation, of normal errors
        if spread < 1e-12:
            break
        weights = np.minimum(1.0, _HUBER * spread / np.maximum(off, 1e-300))
        line = _weighted(x, t, weights)
    return line


def _weighted(x: np.ndarray, t: np.ndarray, weights: np.ndarray) -> Line:
    """The line of least relative squares with neither part below 0."""
    ones, slopes = 1 / t, x / t
    aa, ab, bb = (float(np.sum(weights * p * q)) for p, q in ((ones, ones), (ones, slopes), (slopes, slopes)))
    a, b = float(np.sum(weights * ones)), float(np.sum(weights * slopes))
    level = a / aa, 0.0
    if bb == 0:
        return level
    through_zero = 0.0, b / bb
    determinant = aa * bb - ab * ab
    if determinant <= 1e-12 * aa * bb:  # one size, or all alike
        return level
    alpha, beta = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
    if alpha < 0:
        return through_zero
    return (alpha, beta) if beta >= 0 else level
