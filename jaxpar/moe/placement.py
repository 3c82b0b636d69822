"""Where the experts of a model lie under a plan, and the map by which a step finds them.

    slots       0  1 | 2  3        slots_of    expert 0: 0 3      copies 2
    experts     0  1 | 2  0                    expert 1: 1 -             1
                                               expert 2: 2 -             1

A plan without `expert_slots` has each expert once and in order, and needs no map. With them the map is data of a step,
of a shape that does not depend on the placement: a new one compiles nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxpar.checkpoint.config import MoEConfig
from jaxpar.moe.balance import Placement, place
from jaxpar.moe.slots import experts_in_slots
from jaxpar.nodes import levels
from jaxpar.plan import Plan

NO_SLOT = -1


class SlotMap(NamedTuple):
    """The slots of each expert of a layer, ascending, then NO_SLOT [E, C], and how many they are [E]; int32."""

    slots_of: np.ndarray
    copies: np.ndarray


def most_copies(experts: int, slots: int) -> int:
    """Slots that one expert may have: all that the others leave."""
    return slots - experts + 1


def place_experts(moe: MoEConfig, plan: Plan, loads: np.ndarray) -> Placement:
    """The placement of experts with these loads [layers, E] in the plan's slots.

    Where the router chooses groups, and the ranks of experts lie on nodes that divide them, groups stay on nodes.
    """
    return place(loads, plan.expert_slots, plan.mesh.extent(plan.experts), *groups_and_nodes(moe, plan))


def groups_and_nodes(moe: MoEConfig, plan: Plan) -> tuple[int, int]:
    """Groups of experts that stay on one node each, and the nodes that the ranks of experts lie on; 1, 1: global."""
    of_axes, groups = levels(plan, plan.experts), moe.router.n_group
    nodes = 1 if of_axes.both else plan.mesh.extent(of_axes.across)
    hierarchical = nodes > 1 and moe.router.topk_group < groups and groups % nodes == 0
    return (groups, nodes) if hierarchical else (1, 1)


def first_slots(moe: MoEConfig, plan: Plan) -> np.ndarray:
    """The expert of each slot before any load is known [slots], the same in every layer; EMPTY for none."""
    if not plan.expert_slots:
        return np.array(experts_in_slots(moe.num_experts, plan.mesh.extent(plan.experts)))
    return place_experts(moe, plan, np.ones((1, moe.num_experts))).slots[0]


def slot_map(slots: np.ndarray, experts: int) -> SlotMap:
    """The map of a layer that has these experts in its slots [slots]."""
    found = np.full((experts, most_copies(experts, len(slots))), NO_SLOT, np.int32)
    copies = np.zeros(experts, np.int32)
    for slot, expert in enumerate(slots):
        found[expert, copies[expert]] = slot
        copies[expert] += 1
    return SlotMap(found, copies)
