"""Physical slots: the places on ranks where experts' weights lie, consecutive ones on the same rank.

    experts 0 1 2 3 4 5 over 4 ranks       rank 0: 0 1 | rank 1: 2 3 | rank 2: 4 5 | rank 3: - -

Where experts do not divide, the last slots are empty: weights of zeros to which nothing is routed.
"""

from __future__ import annotations

EMPTY = -1


def slots_per_rank(experts: int, ranks: int) -> int:
    """Slots of each rank when `experts` are dealt out over `ranks`."""
    return -(-experts // ranks)


def experts_in_slots(experts: int, ranks: int) -> tuple[int, ...]:
    """The expert in each slot of all ranks, EMPTY for none."""
    slots = ranks * slots_per_rank(experts, ranks)
    return tuple(slot if slot < experts else EMPTY for slot in range(slots))
