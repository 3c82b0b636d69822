"""Which experts are chosen together: groups of experts dealt over nodes so that few tokens need two nodes.

A token goes once to each node that has one of its experts. Groups are the vertices of a graph, an edge weighs as many
tokens as chose an expert at each of its ends, and the weight of the edges between nodes is the cut:

    chosen together     0-1: 9   2-3: 9   1-2: 1

    node 0   node 1              node 0   node 1
     0  2  |  1  3                0  1  |  2  3
       cut 19           swap 1, 2     cut 1

The parts keep their sizes, so that the graph is improved by swaps, as Kernighan and Lin do (1970); GRACE-MoE
(arXiv:2509.25041) groups experts by affinity to the same end.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from jaxpar.errors import PlanError

SLACK = 0.05
"""A smaller cut is worth this much more than the mean load on a node."""


def cut_weight(together: np.ndarray, node_of: np.ndarray) -> float:
    """Weight of the pairs whose ends are on different nodes.

    Args:
        together: symmetric, of every pair [items, items]; its diagonal does not count.
        node_of: of every item [items].
    """
    return float(together[node_of[:, None] != node_of].sum() / 2)


def check_together(together: ArrayLike, layers: int, experts: int) -> np.ndarray:
    """Co-activation as float64 [layers, experts, experts].

    Raises:
        PlanError: another shape, values that are no counts, or a pair that has two counts.
    """
    given = np.asarray(together)
    if given.shape != (layers, experts, experts) or given.dtype.kind not in "iu":
        raise PlanError(
            f"co-activation is {given.dtype} {list(given.shape)}: give whole numbers [layers, experts, experts], "
            f"{[layers, experts, experts]}"
        )
    if given.min() < 0:
        raise PlanError(f"co-activation holds {given.min()}: a count is a whole number from 0")
    for layer, one, other in np.argwhere(given != given.swapaxes(1, 2))[:1]:
        raise PlanError(
            f"layer {layer}: experts {one} and {other} are chosen together {given[layer, one, other]} times, and "
            f"{other} and {one} {given[layer, other, one]} times: count a pair the same both ways"
        )
    return given.astype(np.float64)


def lower_cut(nodes: np.ndarray, loads: np.ndarray, together: np.ndarray) -> np.ndarray:
    """Swap groups between nodes until no round of swaps lowers the cut; it never rises.

    Args:
        nodes: the groups of each node by load alone, indices [nodes, groups a node].
        loads: of every group [groups].
        together: symmetric, of every pair of groups [groups, groups].

    Returns:
        The groups of each node, ascending. No node's load passes both the heaviest one by load alone and 1 + SLACK
        times the mean.
    """
    node_of = np.empty(nodes.size, np.int64)
    node_of[nodes] = np.arange(len(nodes))[:, None]
    apart = together * (1 - np.eye(nodes.size))
    most = max(loads[nodes].sum(axis=1).max(), (1 + SLACK) * loads.sum() / len(nodes))
    cut = cut_weight(apart, node_of)
    while True:
        swapped = _round(node_of, loads, apart, most)
        lower = cut_weight(apart, swapped)
        if lower >= cut:
            return np.argsort(node_of, kind="stable").reshape(nodes.shape)
        node_of, cut = swapped, lower


def _round(node_of: np.ndarray, loads: np.ndarray, together: np.ndarray, most: float) -> np.ndarray:
    """Swap the best pair, the best pair of the groups left, ...; keep the swaps up to where the cut was lowest.

    A swap may raise the cut: those after it may lower it by more.
    """
    nodes = node_of.max() + 1
    node_of, best_node_of = node_of.copy(), node_of
    gained, best = 0.0, 0.0
    load = np.bincount(node_of, loads)
    to_node = together @ np.eye(nodes)[node_of]  # weight between a group and all that a node has
    heavier = loads[:, None] - loads
    # The pair itself stays cut; a pair on one node, and a group that has moved, are out of the choice.
    lost = 2 * together
    lost[node_of[:, None] == node_of] = np.inf
    while True:
        saved = to_node[:, node_of]
        saved -= np.diag(saved)[:, None]
        saved = saved + saved.T - lost
        # The node of the column gets the group of the row instead of its own.
        fits = heavier <= most - load[node_of]
        saved[~(fits & fits.T)] = -np.inf
        one, other = np.unravel_index(saved.argmax(), saved.shape)
        if saved[one, other] == -np.inf:
            return best_node_of
        here, there = node_of[one], node_of[other]
        load[here] += heavier[other, one]
        load[there] += heavier[one, other]
        moved = together[:, other] - together[:, one]
        to_node[:, here] += moved
        to_node[:, there] -= moved
        node_of[one], node_of[other] = there, here
        for group in (one, other):
            lost[group] = lost[:, group] = np.inf
        gained += saved[one, other]
        if gained > best:
            best, best_node_of = gained, node_of.copy()
