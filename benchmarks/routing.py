"""Routing that benchmarks draw: each token chooses some experts, all alike or by Zipf's law."""

from __future__ import annotations

import numpy as np


def drawn(tokens: int, experts: int, choices: int, law: str) -> np.ndarray:
    """The experts of each token [tokens, choices] int32, all different; `law` is "uniform" or "Zipf"."""
    rank = np.arange(1, experts + 1)
    likely = np.log(1 / rank if law == "Zipf" else np.ones(experts))
    # The largest of such sums are a choice without replacement, each by its weight.
    chance = np.random.default_rng(0).gumbel(size=(tokens, experts))
    return np.argsort(likely + chance, axis=1)[:, -choices:].astype(np.int32)
