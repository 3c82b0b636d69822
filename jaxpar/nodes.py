"""Where the ranks of mesh axes lie: on different nodes, which slow links join, or inside one.

A node is `Plan.devices_per_node` consecutive ranks of the mesh, innermost axes first:

    mesh dp=2,tp=4, nodes of 4:    dp across, tp inside
    mesh dp=2,tp=4, nodes of 2:    dp across, tp both: its ranks 0 1 | 2 3
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from jaxpar.mesh import AXES, MeshSpec
from jaxpar.plan import Plan


class Levels(NamedTuple):
    """Axes by where their ranks lie: on different nodes, on one, or on some of both."""

    across: tuple[str, ...]
    inside: tuple[str, ...]
    both: tuple[str, ...]


def levels(plan: Plan, axes: Sequence[str]) -> Levels:
    """Where `axes` lie; all are inside where no nodes are known, or one node has the mesh."""
    node, span = plan.devices_per_node, 1
    found: dict[str, list[str]] = {"across": [], "inside": [], "both": []}
    for axis in reversed(plan.active(AXES)):
        inner, span = span, span * plan.mesh.sizes[axis]
        if plan.mesh.size <= node or not node or node % span == 0:
            place = "inside"
        else:
            place = "across" if inner % node == 0 else "both"
        if axis in axes:
            found[place].insert(0, axis)
    return Levels(*(tuple(axes) for axes in found.values()))


@lru_cache(maxsize=4096)
def members(mesh: MeshSpec, devices_per_node: int, axes: tuple[str, ...]) -> tuple[int, int]:
    """Ranks of a group over `axes` that lie on one node, and nodes that the group has ranks on.

    It is the group of rank 0; where nodes cut groups unevenly, others may lie on one node more.
    """
    ranks = mesh.extent(axes)
    if not devices_per_node or mesh.size <= devices_per_node:
        return ranks, 1
    strides, span = {}, 1
    for axis in reversed(AXES):
        strides[axis], span = span, span * mesh.sizes[axis]
    offsets = product(*(range(0, mesh.sizes[axis] * strides[axis], strides[axis]) for axis in axes))
    inside = sum(sum(offset) < devices_per_node for offset in offsets)
    return inside, -(-ranks // inside)
