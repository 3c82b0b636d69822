"""When each pipeline stage works on what: the timetable of ticks, its bubble, and how long it takes.

In tick t stage s works on the item that entered at tick t - s. An item is a chunk of a group's prompts in prefill, and
one token of each request of a group in decode. Items enter one a tick:

    tick      0  1  2  3  4  5            3 items through 4 stages: 3 + 4 - 1 ticks,
    stage 0   0  1  2  .  .  .            4 * 3 of the 4 * 6 slots idle
    stage 1   .  0  1  2  .  .
    stage 2   .  .  0  1  2  .
    stage 3   .  .  .  0  1  2

The bubble is that of GPipe (arXiv:1811.06965): (p-1)/(m+p-1) of all slots with m items and p stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

from jaxpar.errors import PlanError


@dataclass(frozen=True)
class Timetable:
    """The tick at which each item enters the first of `stages` stages, in ascending order.

    `groups` is the number of items in a round of decode: a group's item enters only when its last one has left the last
    stage, whose token it is. 0: items wait for no other (prefill).
    """

    stages: int
    entries: tuple[int, ...]
    groups: int = 0

    @property
    def items(self) -> int:
        """How many there are, numbered as they enter."""
        return len(self.entries)

    @property
    def ticks(self) -> int:
        """Until the last item has left the last stage."""
        return self.entries[-1] + self.stages

    @cached_property
    def slots(self) -> np.ndarray:
        """The item that each stage works on [stages, ticks], -1 where it is idle."""
        slots = np.full((self.stages, self.ticks), -1, np.int64)
        for stage in range(self.stages):
            slots[stage, np.array(self.entries) + stage] = np.arange(self.items)
        return slots

    @property
    def idle_slots(self) -> int:
        """Slots of a stage and a tick without an item."""
        return self.stages * (self.ticks - self.items)

    @property
    def idle_share(self) -> Fraction:
        """Those of all slots: the bubble."""
        return Fraction(self.ticks - self.items, self.ticks)


def prefill_timetable(items: int, stages: int) -> Timetable:
    """`items` chunks, one a tick: idle are p(p-1) slots of p(m+p-1).

    Raises:
        PlanError: no item, or no stage.
    """
    _check(items=items, stages=stages)
    return Timetable(stages, tuple(range(items)))


def decode_timetable(groups: int, rounds: int, stages: int) -> Timetable:
    """`rounds` tokens of each of `groups` groups in rotation.

    A round takes max(g, p) ticks: with g >= p the pipe stays full between its first and its last p - 1 ticks; with
    g < p each stage is idle in p - g ticks of every round, and (p-1)/p of the time with one group.

    Raises:
        PlanError: no group, no round, or no stage.
    """
    _check(groups=groups, rounds=rounds, stages=stages)
    length = max(groups, stages)
    entries = tuple(round_ * length + group for round_ in range(rounds) for group in range(groups))
    return Timetable(stages, entries, groups)


def _check(**numbers: int) -> None:
    for name, value in numbers.items():
        if value < 1:
            raise PlanError(f"{name}={value}: it must be at least 1")


@dataclass(frozen=True)
class Schedule:
    """A timetable in time: `starts` and `costs` [items, stages], and the `duration` of it all, in the costs' unit."""

    starts: np.ndarray
    costs: np.ndarray
    duration: float

    @property
    def idle_share(self) -> float:
        """The part of all stages' time in which they do no work of an item."""
        return float(1 - self.costs.sum() / (self.costs.shape[1] * self.duration))


def lockstep(timetable: Timetable, *parts: np.ndarray) -> Schedule:
    """Stages that wait for one another after each tick, which lasts as long as its slowest busy stage.

    Args:
        timetable: of m items and p stages.
        parts: costs of each item on each stage [m, p]; of several arrays each part of a tick waits for its slowest.
    """
    slots = timetable.slots
    stage = np.arange(timetable.stages)[:, None]
    ticks = sum(np.where(slots >= 0, part[slots, stage], 0).max(axis=0) for part in parts)
    begins = np.concatenate([[0.0], np.cumsum(ticks)])
    starts = begins[np.array(timetable.entries)[:, None] + np.arange(timetable.stages)]
    return Schedule(starts, np.sum(parts, axis=0), float(begins[-1]))


def free_running(timetable: Timetable, costs: np.ndarray) -> Schedule:
    """Stages that start an item as soon as they are free and the stage before has finished it.

    The recursion of a flow shop: end[j, s] = max(end[j, s-1], end[j-1, s]) + cost[j, s]; in decode an item also waits
    for its group's last one to leave the last stage.

    Args:
        timetable: of m items and p stages.
        costs: of each item on each stage [m, p].
    """
    ends = np.zeros(costs.shape)
    for item in range(timetable.items):
        waits = timetable.groups and item >= timetable.groups
        ready = ends[item - timetable.groups, -1] if waits else 0.0
        for stage in range(timetable.stages):
            free = ends[item - 1, stage] if item else 0.0
            ready = ends[item, stage] = max(ready, free) + costs[item, stage]
    return Schedule(ends - costs, costs, float(ends[-1, -1]))
