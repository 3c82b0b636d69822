"""Where requests sit: which replica and lane, and which pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxpar.engine.sizes import eighths, lanes_of, pages_of
from jaxpar.plan import Plan


@dataclass(frozen=True)
class Lanes:
    """Lanes and pages of a group of requests.

    `lane[i]` is the lane in which request i decodes, among all replicas' lanes; `table` [lanes, pages of the longest]
    page ids local to the replica, -1 where a request has no page; `pages` is the number that every rank's cache must
    have. All ranks of cp number their pages alike.
    """

    total: int
    lane: list[int]
    table: np.ndarray
    pages: int


def assign(capacity: Sequence[int], plan: Plan) -> Lanes:
    """Give each request, which will store up to `capacity[i]` tokens on a rank, a lane and its pages.

    Requests go to replicas in turn; lanes without a request do nothing. Of two half batches the first has half of a
    replica's requests, the second the others.
    """
    replicas = plan.mesh.dp * plan.mesh.ep
    local = lanes_of(len(capacity), plan)
    pages = [pages_of(tokens, plan) for tokens in capacity]
    table = np.full((replicas * local, max(pages)), -1, np.int32)
    used = [0] * replicas
    lane = []
    for request, count in enumerate(pages):
        replica, slot = request % replicas, request // replicas
        half = len(range(replica, len(capacity), replicas)) // 2
        if plan.two_batch_overlap and slot >= half and local > 1:
            slot += local // 2 - half
        row = replica * local + slot
        table[row, :count] = np.arange(used[replica], used[replica] + count)
        used[replica] += count
        lane.append(row)
    return Lanes(replicas * local, lane, table, eighths(max(used)))
