"""Where requests sit: which group, replica and lane, and which pages.

Requests are dealt to replicas in turn, and those of a replica to groups in turn: the groups are what goes through the
stages of a pipeline one after another (one group without stages), and each has the lanes of a step to itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxpar.engine.sizes import eighths, groups_in, lanes_of, pages_of
from jaxpar.plan import Plan


@dataclass(frozen=True)
class Lanes:
    """Groups, lanes and pages of requests.

    `lane[i]` is the lane in which request i decodes with the others of group `group[i]`, among the `total` lanes of all
    replicas; `table` [requests, pages of the longest] are page ids local to the replica, -1 where a request has no
    page; `pages` is the number that every rank's cache must have. All ranks of cp number their pages alike.
    """

    total: int
    group: list[int]
    lane: list[int]
    table: np.ndarray
    pages: int


def groups_in_turn(requests: int, plan: Plan) -> list[int]:
    """The group of each request."""
    replicas, groups = plan.mesh.dp * plan.mesh.ep, groups_in(requests, plan)
    return [request // replicas % groups for request in range(requests)]


def lanes_in_turn(requests: int, plan: Plan) -> list[int]:
    """The lane in which each request decodes with its group, among all replicas' lanes.

    Requests go to replicas in turn; lanes without a request do nothing. Of two half batches the first has half of a
    replica's requests, the second the others.
    """
    replicas, local, groups = plan.mesh.dp * plan.mesh.ep, lanes_of(requests, plan), groups_in(requests, plan)
    lanes = []
    for request in range(requests):
        replica, slot = request % replicas, request // replicas // groups
        half = len(range(replica, requests, replicas)) // 2
        if plan.two_batch_overlap and slot >= half and local > 1:
            slot += local // 2 - half
        lanes.append(replica * local + slot)
    return lanes


def assign(capacity: Sequence[int], plan: Plan) -> Lanes:
    """Give each request, which will store up to `capacity[i]` tokens on a rank, a lane and its pages."""
    replicas, local = plan.mesh.dp * plan.mesh.ep, lanes_of(len(capacity), plan)
    pages = [pages_of(tokens, plan) for tokens in capacity]
    table = np.full((len(capacity), max(pages)), -1, np.int32)
    used = [0] * replicas
    for request, count in enumerate(pages):
        replica = request % replicas
        table[request, :count] = np.arange(used[replica], used[replica] + count)
        used[replica] += count
    group, lane = groups_in_turn(len(capacity), plan), lanes_in_turn(len(capacity), plan)
    return Lanes(replicas * local, group, lane, table, eighths(max(used)))
