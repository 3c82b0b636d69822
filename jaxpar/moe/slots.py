"""Physical slots: the places on ranks where experts' weights lie, consecutive ones on the same rank.

    experts 0 1 2 3 4 5 over 4 ranks       rank 0: 0 1 | rank 1: 2 3 | rank 2: 4 5 | rank 3: - -

Where experts do not divide, the last slots are empty: weights of zeros to which nothing is routed. A plan may ask for
more slots than experts: a placement (`moe.placement`) fills every one of them, and hot experts lie in several.
"""

from __future__ import annotations

from jaxpar.errors import PlanError
from jaxpar.moe.loads import MAX_EXPERTS
from jaxpar.tables import counted

EMPTY = -1

MAX_SLOTS = 2 * MAX_EXPERTS
"""The most that experts are placed in."""


def slots_per_rank(experts: int, ranks: int, asked: int = 0) -> int:
    """Slots of each rank when `experts` are dealt out over `ranks`; `asked` of all ranks, 0: as many as it takes.

    Raises:
        PlanError: fewer slots than experts, more than MAX_SLOTS, or a number that the ranks do not divide.
    """
    if not asked:
        return -(-experts // ranks)
    if asked < experts:
        least = experts + -experts % ranks
        raise PlanError(
            f"expert_slots={asked} for {counted(experts, 'expert')}: use {least} or more, or 0 for no copies"
        )
    if asked > MAX_SLOTS:
        most = MAX_SLOTS - MAX_SLOTS % ranks
        raise PlanError(f"expert_slots={asked}: experts are placed in {MAX_SLOTS} at most; use {most} or fewer")
    if asked % ranks:
        raise PlanError(
            f"expert_slots={asked} on {counted(ranks, 'rank')}: each has as many; "
            f"use a multiple of {ranks}, such as {asked + -asked % ranks}"
        )
    return asked // ranks


def experts_in_slots(experts: int, ranks: int) -> tuple[int, ...]:
    """The expert in each slot of all ranks where they lie in order, EMPTY for none."""
    slots = ranks * slots_per_rank(experts, ranks)
    return tuple(slot if slot < experts else EMPTY for slot in range(slots))
