"""Balancing: how many copies each expert has, and on which device they lie, so that devices get equal loads.

A device has a fixed number of physical slots, each with the weights of one expert. With more slots than experts the hot
ones get copies, and a token goes to one copy. The policies are the greedy ones of EPLB (DeepSeek's Expert Parallelism
Load Balancer):

    loads 120 40 20 20, on 8 slots of 4 devices

    expert          0     1     2     3
    copies          4     2     1     1      the next slot to the largest load per copy
    load per copy  30    20    20    20

    device            0       1       2       3
    slots           0 | 1   0 | 2   0 | 3   0 | 1      the next copy to the least loaded device that has room
    load             50      50      50      50

Global is all of it at once. Hierarchical keeps a group of experts on one node, so that a router that chooses groups
sends a token to few nodes: groups are packed onto nodes, then copies are made and packed within each node. Nodes that
do not divide the groups are refused; EPLB is global then. Ties go to the lowest index.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from jaxpar.errors import PlanError
from jaxpar.moe.coactivation import check_together, lower_cut
from jaxpar.moe.loads import check_loads
from jaxpar.moe.slots import MAX_SLOTS
from jaxpar.tables import counted
from jaxpar.values import shown, whole_number

_HASH = 2_654_435_769  # 2^32 over the golden ratio: Knuth's multiplicative hash


@dataclass(frozen=True, eq=False)
class Placement:
    """Experts on physical slots; device d has the slots from d * slots / devices."""

    slots: np.ndarray
    """The expert of each slot [layers, slots]."""
    copies: np.ndarray
    """Slots of each expert [layers, experts]."""
    device_loads: np.ndarray
    """Load of each device [layers, devices], where copies share an expert's load evenly."""


def place(
    loads: ArrayLike,
    slots: int,
    devices: int,
    groups: int = 1,
    nodes: int = 1,
    together: ArrayLike | None = None,
) -> Placement:
    """Choose copies and their devices, layer by layer: global, or hierarchical where `groups` or `nodes` is given.

    Two devices of a node differ by no more than its largest load per copy. A lucky order of experts may be better:
    packing is greedy.

    Args:
        loads: of every expert [layers, experts], in any unit.
        slots: of all devices together; those past the number of experts are copies.
        devices: that have slots / devices each.
        groups: of consecutive experts, each of which stays on one node.
        nodes: of consecutive devices.
        together: tokens that chose both experts of a pair [layers, experts, experts], symmetric: groups are then dealt
            over nodes so that fewer tokens need two nodes. With as many groups as experts each is placed on its own.

    Raises:
        PlanError: loads or counts that are none, or numbers that do not divide.
    """
    given = check_loads(loads)
    layers, experts = given.shape
    slots, devices, groups, nodes = _check_sizes(experts, slots, devices, groups, nodes)
    group_loads = given.reshape(layers, groups, -1).sum(axis=2)
    group_pairs = None
    if together is not None:
        if nodes == 1:
            raise PlanError(
                "nodes=1: co-activation says which experts share a node; use 2 nodes or more, or leave it out"
            )
        pairs = check_together(together, layers, experts)
        group_pairs = pairs.reshape(layers, groups, experts // groups, groups, -1).sum(axis=(2, 4))
    placed = np.empty((layers, slots), np.int64)
    for layer in range(layers):
        groups_of = _pack(group_loads[layer], nodes)
        if group_pairs is not None:
            groups_of = lower_cut(groups_of, group_loads[layer], group_pairs[layer])
        experts_of = np.arange(experts).reshape(groups, -1)[groups_of].reshape(nodes, -1)
        placed[layer] = np.concatenate(
            [mine[_fill_node(given[layer, mine], slots // nodes, devices // nodes)] for mine in experts_of]
        )
    copies = np.stack([np.bincount(row, minlength=experts) for row in placed])
    return Placement(placed, copies, device_loads(given, placed, devices))


def device_loads(loads: np.ndarray, slots: np.ndarray, devices: int) -> np.ndarray:
    """Load of each device [layers, devices] where `slots` [layers, slots] have these experts, -1 for none.

    Copies share their expert's load [layers, experts] evenly.
    """
    layers, experts = loads.shape
    # A column for none, which has no load.
    with_none = np.pad(loads, ((0, 0), (0, 1)))
    copies = np.stack([np.bincount(row % (experts + 1), minlength=experts + 1) for row in slots])
    per_copy = np.take_along_axis(with_none / np.maximum(copies, 1), slots % (experts + 1), axis=1)
    return per_copy.reshape(layers, devices, -1).sum(axis=2)


def in_order(loads: ArrayLike, devices: int) -> np.ndarray:
    """Load of each device [layers, devices] without balancing: experts dealt out in order, without copies.

    Where they do not divide, the first devices have one more.

    Raises:
        PlanError: loads or a number of devices that are none.
    """
    parts = np.array_split(check_loads(loads), _size("devices", devices), axis=1)
    return np.stack([part.sum(axis=1) for part in parts], axis=1)


def over_mean(device_loads: np.ndarray) -> np.ndarray:
    """Each device's load over the mean of its layer [layers, devices]; 1 where a layer has no load."""
    devices = device_loads.shape[1]
    total = device_loads.sum(axis=1, keepdims=True)
    return devices * np.divide(device_loads, total, out=np.full_like(device_loads, 1 / devices), where=total > 0)


def pick_copy(token: Any, copies: Any) -> Any:
    """Which of its expert's `copies` a token goes to, from 0: (token * 2654435769 mod 2^32) mod copies.

    Integer arrays, numpy or JAX, of shapes that broadcast: the token's number (`nn.moe.token_numbers`), and the
    copies of the expert that it chose. Gives int32.
    """
    hashed = token.astype(np.uint32) * np.uint32(_HASH)
    return (hashed % copies.astype(np.uint32)).astype(np.int32)


def _fill_node(loads: np.ndarray, slots: int, devices: int) -> np.ndarray:
    """The expert of each slot of a node, device by device [slots], from the loads of its experts."""
    owners, per_copy = _copy(loads, slots)
    return owners[_pack(per_copy[owners], devices)].ravel()


def _copy(loads: np.ndarray, slots: int) -> tuple[np.ndarray, np.ndarray]:
    """The expert of each copy [slots], the experts themselves first, and the load per copy of each [experts].

    No other choice of copies has a smaller largest load per copy.
    """
    owners = [*range(len(loads))]
    copies = np.ones(len(loads), np.int64)
    hottest = [(-load, expert) for expert, load in enumerate(loads.tolist())]
    heapq.heapify(hottest)
    for _ in range(slots - len(loads)):
        _, expert = hottest[0]
        owners.append(expert)
        copies[expert] += 1
        heapq.heapreplace(hottest, (-float(loads[expert] / copies[expert]), expert))
    return np.array(owners), loads / copies


def _pack(loads: np.ndarray, bins: int) -> np.ndarray:
    """Items in bins, as many in each [bins, items a bin]: the heaviest first, onto the least loaded that has room."""
    room = len(loads) // bins
    if room == 1:
        return np.arange(bins)[:, None]  # nothing to balance, so that nothing moves
    packed: list[list[int]] = [[] for _ in range(bins)]
    lightest = [(0.0, chosen) for chosen in range(bins)]
    for item in np.argsort(-loads, kind="stable").tolist():
        load, chosen = heapq.heappop(lightest)
        packed[chosen].append(item)
        if len(packed[chosen]) < room:
            heapq.heappush(lightest, (load + float(loads[item]), chosen))
    return np.array(packed)


def _check_sizes(experts: int, slots: int, devices: int, groups: int, nodes: int) -> list[int]:
    """The four numbers as ints; PlanError where one is none, or does not divide another."""
    slots, devices, groups, nodes = sizes = [
        _size(name, given)
        for name, given in (("slots", slots), ("devices", devices), ("groups", groups), ("nodes", nodes))
    ]
    if slots < experts:
        raise PlanError(f"{counted(slots, 'slot')} for {counted(experts, 'expert')}: use {experts} or more")
    if slots % devices:
        raise PlanError(
            f"{counted(slots, 'slot')} on {counted(devices, 'device')}: each has as many; "
            f"use a multiple of {devices}, such as {slots + -slots % devices}"
        )
    if devices % nodes:
        raise PlanError(
            f"{counted(devices, 'device')} on {counted(nodes, 'node')}: each has as many; "
            f"use a number of nodes that divides {devices}"
        )
    if experts % groups:
        raise PlanError(
            f"{counted(experts, 'expert')} in {counted(groups, 'group')}: each has as many; "
            f"use a number of groups that divides {experts}"
        )
    if groups % nodes:
        raise PlanError(
            f"{counted(groups, 'group')} on {counted(nodes, 'node')}: a group stays on one node, and each has as many; "
            f"use a multiple of {nodes} groups, or leave groups and nodes out for the global policy"
        )
    return sizes


def _size(name: str, given: int) -> int:
    size = whole_number(given)
    if size is None or not 1 <= size <= MAX_SLOTS:
        raise PlanError(f"{name}={shown(given)}: it must be a whole number from 1 to {MAX_SLOTS}")
    return size
