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


def lanes_in_turn(requests: int, plan: Plan) -> list[int]:
    """The lane in which each request decodes, among all replicas' lanes.

    Requests go to replicas in turn; lanes without a request do nothing. Of two half batches the first has half of a
    replica's requests, the second the others.
    """
    replicas, local = plan.mesh.dp * plan.mesh.ep, lanes_of(requests, plan)
    lanes = []
    for request in range(requests):
        replica, slot = request % replicas, request // replicas
        half = len(range(replica, requests, replicas)) // 2
        if plan.two_batch_overlap and slot >= half and local > 1:
            slot += local // 2 - half
        lanes.append(replica * local + slot)
    return lanes


def assign(capacity: Sequence[int], plan: Plan) -> Lanes:
    """Give each request, which will store up to `capacity[i]` tokens on a rank, a lane and its pages."""
    replicas, local = plan.mesh.dp * plan.mesh.ep, lanes_of(len(capacity), plan)
    pages = [pages_of(tokens, plan) for tokens in capacity]
    table = np.full((replicas * local, max(pages)), -1, np.int32)
    used = [0] * replicas
    lane = lanes_in_turn(len(capacity), plan)
    for row, count in zip(lane, pages, strict=True):
        replica = row // local
        table[row, :count] = np.arange(used[replica], used[replica] + count)
        used[replica] += count
    return Lanes(replicas * local, lane, table, eighths(max(used)))
