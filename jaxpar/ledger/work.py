"""The work of prefill attention that depends on positions: how much each rank has to do, and how much it computes.

Closed forms count every tile. Here the positions are dealt as a session deals them, so that the tiles are known which
`attention.tiles.attend` leaves out because no query of theirs sees a key.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxpar.attention.tiles import seen_tiles, tile_sizes
from jaxpar.engine.sizes import local_tokens, prefill_chunks
from jaxpar.layout import deal
from jaxpar.registry import chosen
from jaxpar.strategies import Step


@dataclass(frozen=True)
class Work:
    """Pairs of a query and a key, of one request and one head, over a whole prefill.

    `seen` [cp] are those that each rank's queries see under the causal mask; `computed` [cp] those of the tiles that
    each rank computes, for as many heads. A rank of Ulysses computes all pairs for some of the heads: its share of
    them counts.
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


def prefill_work(steps: list[Step], seq: int) -> Work:
    """The work of prefilling one request of `seq` tokens; `steps` are those of its chunks, in order."""
    plan = steps[0].plan
    ranks = plan.mesh.cp
    cached: list[list[np.ndarray]] = [[] for _ in range(ranks)]
    seen, computed = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
    for (first, size), step in zip(prefill_chunks(seq, plan), steps, strict=True):
        dealt = [first + held for held in deal(plan.layout, first, min(size, seq - first), ranks, plan.cp_interleave)]
        for rank, held in enumerate(dealt):
            cached[rank].append(held)
            seen[rank] += (held + 1).sum()
        queries = _padded(dealt, local_tokens(size, plan))
        keys = _padded([np.concatenate(chunks) for chunks in cached], step.keys)
        computed += _computed(queries, keys, chosen(step)["prefill_attention"].block(step))
    return Work(seen.tolist(), computed.tolist())


def _computed(queries: np.ndarray, keys: np.ndarray, block: tuple[int, int, int]) -> np.ndarray:
    """Pairs [cp] of the tiles that each rank computes; `queries` [cp, T], `keys` [cp, S] positions of every rank."""
    ranks, (together, key_ranks, group) = len(queries), block
    q = queries.reshape(ranks // together, -1)
    k = keys.reshape(ranks // key_ranks, -1)
    tile = tile_sizes(q.shape[1], k.shape[1], group)
    if (tile.queries, tile.keys) == (q.shape[1], k.shape[1]):
        pairs = np.full(len(q), k.size * tile.queries)  # a problem of one tile is computed in any case
    else:
        q, k = _whole_tiles(q, tile.queries), _whole_tiles(k, tile.keys)
        parts = [sum(int(seen_tiles(a[None], b[None], tile.queries, tile.part, None).sum()) for b in k) for a in q]
        pairs = np.asarray(parts) * tile.queries * tile.part
    # The ranks that put their tokens together share the heads.
    return np.repeat(pairs // together, together)


def _padded(rows: list[np.ndarray], length: int) -> np.ndarray:
    return np.stack([np.pad(row, (0, length - len(row)), constant_values=-1) for row in rows]).astype(np.int32)


def _whole_tiles(x: np.ndarray, tile: int) -> np.ndarray:
    return np.pad(x, ((0, 0), (0, -x.shape[1] % tile)), constant_values=-1)
