"""What it costs that every rank of tp holds the latents of all heads, against the weights that tp splits.

P ranks, of which tp share a replica's requests: each reads W / tp of attention's weights, and the latents C of all
requests over the P / tp replicas.

    W / tp + C tp / P      is least at      tp* = sqrt(W P / C)

Short contexts want tp, long ones replicas: requests over dp, each rank with latents of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Latents:
    """Bytes of attention's weights and of the latents of the tokens asked for, in all layers, each counted once."""

    weight_bytes: int
    cache_bytes: int
    ranks: int

    def read(self, tp: float) -> float:
        """Bytes that a rank holds of both, and a decode step reads, where `tp` of the ranks share requests."""
        return self.weight_bytes / tp + self.cache_bytes * tp / self.ranks

    @property
    def best_tp(self) -> float:
        """The tp at which that is least."""
        return math.sqrt(self.weight_bytes * self.ranks / self.cache_bytes)
