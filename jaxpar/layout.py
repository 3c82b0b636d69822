"""Layouts: how the positions of a chunk are dealt over the ranks of `cp`.

Eight positions over two ranks, and what each rank holds:

    contiguous   0 1 2 3 | 4 5 6 7        one block a rank
    zigzag       0 1 6 7 | 2 3 4 5        2N blocks: rank r holds blocks r and 2N-1-r (Llama 3, arXiv:2407.21783)
    striped      0 2 4 6 | 1 3 5 7        position p lies on rank p mod N (Striped Attention, arXiv:2311.09431)

A layout is only a permutation: masks come from the positions, which travel with the tokens. Where a length does not
divide, the first blocks are one longer, and shorter ranks are padded at the end with position -1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxpar.errors import PlanError


def owner(positions: Any, ranks: int, interleave: int = 1) -> Any:
    """The rank of each position (numpy or JAX) under `striped`; also where any decoded token is stored."""
    return positions // interleave % ranks


def _contiguous(first: int, count: int, ranks: int, interleave: int) -> list[np.ndarray]:
    return np.array_split(np.arange(count), ranks)


def _zigzag(first: int, count: int, ranks: int, interleave: int) -> list[np.ndarray]:
    blocks = np.array_split(np.arange(count), 2 * ranks)
    return [np.concatenate([blocks[rank], blocks[-1 - rank]]) for rank in range(ranks)]


def _striped(first: int, count: int, ranks: int, interleave: int) -> list[np.ndarray]:
    owners = owner(first + np.arange(count), ranks, interleave)
    return [np.flatnonzero(owners == rank) for rank in range(ranks)]


_DEALS: dict[str, Callable[[int, int, int, int], list[np.ndarray]]] = {
    "contiguous": _contiguous,
    "zigzag": _zigzag,
    "striped": _striped,
}
LAYOUTS = tuple(_DEALS)


def deal(layout: str, first: int, count: int, ranks: int, interleave: int = 1) -> list[np.ndarray]:
    """Which tokens of a chunk each rank holds, as ascending indices from 0.

    Args:
        layout: one of LAYOUTS.
        first: position of the chunk's first token; `striped` alone depends on it.
        count: tokens of the chunk.
        ranks: of cp.
        interleave: positions that follow one another on a rank, of `striped`.
    """
    if layout not in _DEALS:
        raise PlanError(f"layout={layout!r} is not a layout: use {', '.join(LAYOUTS)}")
    return _DEALS[layout](first, count, ranks, interleave)


def local_length(layout: str, count: int, ranks: int, interleave: int = 1) -> int:
    """The most tokens that one rank holds of a chunk of up to `count`, wherever the chunk begins."""
    # A chunk that begins with a stripe gives that stripe's rank as much as any chunk of its length gives a rank.
    return max(len(held) for held in deal(layout, 0, count, ranks, interleave))


def causal_work(held: list[np.ndarray], window: int | None = None) -> np.ndarray:
    """Pairs of a query and a key that it sees, [ranks, ring steps]; at step s rank r has the keys of rank r - s.

    `held` are the positions of each rank. The sum over all S positions is S(S+1)/2; the largest row is the slowest
    rank. With a sliding `window` W a query sees the W latest keys, its own among them: query - key < W.
    """
    ranks = len(held)
    work = np.zeros((ranks, ranks), np.int64)
    for rank, queries in enumerate(held):
        for step in range(ranks):
            keys = np.sort(held[(rank - step) % ranks])
            work[rank, step] = np.searchsorted(keys, queries, side="right").sum()
            if window is not None:
                work[rank, step] -= np.searchsorted(keys, queries - window, side="right").sum()
    return work
