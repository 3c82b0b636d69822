"""`one_shot`: everybody sends everything to everybody, and adds up for itself: one step.

rank 0: p0 -+               +-> p0 p1 p2 p3 -> p0 + p1 + p2 + p3
rank 1: p1 -+-- all-gather -+-> p0 p1 p2 p3 -> p0 + p1 + p2 + p3        (P-1) M sent by each rank
rank 2: p2 -+               +-> ...
rank 3: p3 -+

It sends P/2 times the bytes of a two-shot sum and waits once instead of twice: for the small messages of decoding
(TensorRT-LLM's and vLLM's custom all-reduce). The sum runs in float32, in the order of the ranks, and is rounded once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxpar.collectives.bounds import rounding
from jaxpar.collectives.fixed_order import all_sum
from jaxpar.collectives.reduction import Message, Reduction, all_reduce_only, sublayers_traffic
from jaxpar.ledger.traffic import Traffic
from jaxpar.plan import Plan
from jaxpar.strategies import Step, Strategy


def _messages(elements: int, itemsize: int, sizes: Mapping[str, int]) -> list[Message]:
    return [Message("all_gather", 1, elements * itemsize)]


def error_bound(parts: np.ndarray, dtype: Any) -> np.ndarray:
    """Additions in float32, and one rounding to `dtype`, however many ranks there are."""
    return rounding(parts, dtype, 1)


REDUCTION = all_reduce_only("one_shot", all_sum, _messages, error_bound)


def run(plan: Plan) -> Reduction:
    """An all-gather and a local sum; the backend's halves."""
    return REDUCTION


def traffic(step: Step) -> list[Traffic]:
    """P - 1 times the residual's [T, D], twice a layer."""
    return sublayers_traffic(step, REDUCTION)


def check(step: Step) -> str | None:
    """Nothing is asked of the shapes."""
    return None


STRATEGY = Strategy(
    name="one_shot",
    sublayer="all_reduce",
    axes=("cp", "tp"),
    collectives=("all_gather", "reduce_scatter"),
    needs="any shape",
    run=run,
    traffic=traffic,
    check=check,
)
