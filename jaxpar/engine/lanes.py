"""Where requests sit: which replica and lane, which pages, and the few sizes for which programs are compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxpar.plan import Plan


def bucket(n: int) -> int:
    """The power of two at or above n: sizes are rounded up to it, so that few programs serve all lengths."""
    return 1 << (n - 1).bit_length()


@dataclass(frozen=True)
class Lanes:
    """Lanes and pages of a group of requests.

    `lane[i]` is the lane of request i among all replicas' lanes; `table` [lanes, pages of the longest] page ids local
    to the replica, -1 where a request has no page; `pages` is the number that every replica's cache must have.
    """

    total: int
    lane: list[int]
    table: np.ndarray
    pages: int


def assign(capacity: Sequence[int], plan: Plan) -> Lanes:
    """Give each request, which will store up to `capacity[i]` tokens, a lane and its pages.

    Requests go to replicas in turn; each replica's number of lanes is rounded up to a power of two, and lanes without
    a request do nothing.
    """
    replicas = plan.mesh.dp * plan.mesh.ep
    local = bucket(-(-len(capacity) // replicas))
    pages = [-(-tokens // plan.page_size) for tokens in capacity]
    table = np.full((replicas * local, max(pages)), -1, np.int32)
    used = [0] * replicas
    lane = []
    for request, count in enumerate(pages):
        replica, slot = request % replicas, request // replicas
        row = replica * local + slot
        table[row, :count] = np.arange(used[replica], used[replica] + count)
        used[replica] += count
        lane.append(row)
    return Lanes(replicas * local, lane, table, bucket(max(used)))
