"""How far a sum over ranks may lie from the exact one.

With u half the distance of 1 to the next number (2^-24 in float32, 2^-8 in bfloat16, 2^-11 in float16), a sum of x_0
... x_{P-1} in which a value passes at most k roundings errs by at most

    ((1 + u)^k - 1) * (|x_0| + ... + |x_{P-1}|)

(Higham, Accuracy and Stability of Numerical Algorithms, 4.2). To it comes what backends do near zero: float32 numbers
below the least normal one may count as zero, and float16 ends at 6e-8. Sums of |x| beyond the largest number of the
dtype have no bound: a partial sum may be infinite.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np


def rounding(parts: np.ndarray, dtype: Any, roundings: int) -> np.ndarray:
    """The bound for float64 `parts` [P, ...] whose values pass `roundings` in `dtype` and P additions in float32."""
    ranks, unit = len(parts), float(jnp.finfo(dtype).eps) / 2
    single = float(np.finfo(np.float32).eps) / 2
    growth = (1 + unit) ** roundings * (1 + single) ** ranks - 1
    return growth * np.abs(parts).sum(axis=0) + (ranks + roundings) * least(dtype)


def each_addition(parts: np.ndarray, dtype: Any) -> np.ndarray:
    """The bound of any order of P - 1 additions, each of which is rounded to `dtype`, as is the result."""
    return rounding(parts, dtype, len(parts))


def least(dtype: Any) -> float:
    """What may be lost of a value near zero."""
    return max(float(np.finfo(np.float32).tiny), float(jnp.finfo(dtype).smallest_subnormal))
