"""The work of prefill attention that depends on positions: how much each rank has to do, and how much it computes.

Closed forms count every tile. Here the positions are dealt as a session deals them, so that the tiles are known which
`attention.tiles.attend` leaves out because no query of theirs sees a key.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from jaxpar.attention.tiles import seen_tiles, tile_sizes
from jaxpar.checkpoint.config import ModelConfig
from jaxpar.engine.prefill import prefill_steps
from jaxpar.layout import deal
from jaxpar.ledger.held import Held
from jaxpar.plan import Phase, Plan
from jaxpar.registry import chosen
from jaxpar.strategies import Step


@dataclass(frozen=True)
class Work:
    """Pairs of a query vector and a key, of one request on the ranks of one tp rank, in all layers of a prefill.

    `seen` [cp] are those that the mask lets the queries see which each rank computes; `computed` [cp] those of the
    tiles that it computes, copies and padding of heads among them.
    """

    seen: list[int]
    computed: list[int]

    @property
    def imbalance(self) -> float:
        """The slowest rank's pairs over the mean."""
        return max(self.seen) * len(self.seen) / sum(self.seen)

    @property
    def excess(self) -> float:
        """Pairs computed over pairs seen, all ranks together."""
        return sum(self.computed) / sum(self.seen)


def prefill_work(config: ModelConfig, plan: Plan, seq: int, batch: int = 1) -> Work:
    """The work of prefilling the first of `batch` requests of `seq` tokens."""
    windows, requests = Counter(config.windows), Held("prefill", batch, seq, plan)
    ranks = plan.mesh.cp
    fixed: Phase | None = "prefill" if plan.fixed_order else None
    cached: list[list[np.ndarray]] = [[] for _ in range(ranks)]
    seen, computed = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
    parts = [
        (part.first, part.size, Step(config, plan, "prefill", taken.lanes, taken.tokens, keys).batches[0])
        for taken in prefill_steps([seq] * batch, plan)
        for keys in [requests.keys(min(taken.offset + taken.size, seq))]
        for part in taken.parts
        if part.request == 0
    ]
    for first, size, step in parts:
        dealt = [first + held for held in deal(plan.layout, first, size, ranks, plan.cp_interleave)]
        for rank, held in enumerate(dealt):
            cached[rank].append(held)
        queries = _padded(dealt, step.tokens)
        keys = _padded([np.concatenate(chunks) for chunks in cached], step.keys)
        strategy = chosen(step)[f"{step.phase}_attention"]
        for rank in range(ranks):
            share = strategy.share(step, rank)
            for q_ranks, k_ranks in share.blocks:
                q, k = queries[q_ranks].ravel(), keys[k_ranks].ravel()
                for window, layers in windows.items():
                    seen[rank] += layers * share.real * _seen(q, k, window)
                    pairs = len(q) * len(k) if share.all_tiles else _computed(q, k, window, share.group, fixed)
                    computed[rank] += layers * share.heads * pairs
    return Work(seen.tolist(), computed.tolist())


def _seen(queries: np.ndarray, keys: np.ndarray, window: int | None) -> int:
    q, k = queries[queries >= 0], np.sort(keys[keys >= 0])
    seen = np.searchsorted(k, q, side="right").sum()
    return int(seen if window is None else seen - np.searchsorted(k, q - window, side="right").sum())


def _computed(queries: np.ndarray, keys: np.ndarray, window: int | None, group: int, fixed: Phase | None) -> int:
    tile = tile_sizes(len(queries), len(keys), group, fixed)
    if fixed is None and (tile.queries, tile.keys) == (len(queries), len(keys)):
        return len(queries) * len(keys)  # a problem of one tile is computed in any case
    q, k = _whole_tiles(queries, tile.queries), _whole_tiles(keys, tile.keys)
    return int(seen_tiles(q, k, tile.queries, tile.part, window).sum()) * tile.queries * tile.part


def _padded(rows: list[np.ndarray], length: int) -> np.ndarray:
    return np.stack([np.pad(row, (0, length - len(row)), constant_values=-1) for row in rows]).astype(np.int32)


def _whole_tiles(positions: np.ndarray, tile: int) -> np.ndarray:
    return np.pad(positions, (0, -len(positions) % tile), constant_values=-1)[None]
