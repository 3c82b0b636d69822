"""Which slot's weights go where when a layer gets a new placement, planned on the host.

    slots of     rank 0    rank 1    rank 2          0 -> 1    1 -> 2        sent
    before       0 1       2 3       0 1      round 0: expert 0, expert 3      1 1 0 slots
    after        0 1       2 0       0 3

An expert that a rank keeps stays in its slot, and one that gets a second slot there is copied without being sent.
The others come from one of the ranks that hold them: the one that has sent this rank least so far, of several the one
that has sent least of all. In a round each rank sends each other rank at most one slot, straight out of its weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from jaxpar.collectives.move import Pieces


class Moves(NamedTuple):
    """What P ranks with S slots each do to one layer; int32.

    `local` [P, S]: the rank's own slot whose weights each slot begins with, its own number where nothing changes or
    where others come. `pieces` [P, S, P] each: of a ragged all-to-all in each of up to S rounds. `rounds` []: how many
    there are.
    """

    local: Any
    pieces: Pieces
    rounds: Any

    @property
    def sent(self) -> np.ndarray:
        """Slots that each rank sends [P]."""
        sent: np.ndarray = self.pieces.sizes.sum(axis=(1, 2))
        return sent


def keep_in_place(old: np.ndarray, new: np.ndarray, ranks: int, nodes: int = 1) -> np.ndarray:
    """The placement `new` [slots], its ranks and their slots in an order that leaves much of `old` where it is.

    Ranks change places within their node only. A rank's experts lie in the slots that they had there.
    """
    sides = (slots.reshape(nodes, ranks // nodes, -1) for slots in (old, new))
    return np.concatenate(
        [_keep_slots(rank, row) for node in zip(*sides, strict=True) for rank, row in _keep_ranks(*node)]
    )


def _keep_ranks(before: np.ndarray, after: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Each rank's slots before, with those after that share most with them [ranks, S]: the best pair first."""
    every = np.arange(max(before.max(), after.max()) + 1)
    has, gets = ((slots[:, :, None] == every).any(axis=1).astype(np.int64) for slots in (before, after))
    chosen: dict[int, int] = {}
    free = {*range(len(after))}
    for pair in np.argsort(-(has @ gets.T), axis=None, kind="stable").tolist():
        rank, row = divmod(pair, len(after))
        if rank not in chosen and row in free:
            chosen[rank] = row
            free.remove(row)
    return ((before[rank], after[chosen[rank]]) for rank in range(len(before)))


def _keep_slots(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """The experts of one rank after, in the slots that they have before [S]; the others in those that are left."""
    wanted, placed, free = Counter(after.tolist()), after.copy(), []
    for slot, expert in enumerate(before.tolist()):
        if wanted[expert]:
            placed[slot] = expert
            wanted[expert] -= 1
        else:
            free.append(slot)
    placed[free] = [*wanted.elements()]
    return placed


def plan_moves(old: np.ndarray, new: np.ndarray, ranks: int) -> Moves:
    """From the expert of each slot before [slots] to that after; every expert has a slot in both."""
    before, after = old.reshape(ranks, -1), new.reshape(ranks, -1)
    slots = before.shape[1]
    local = np.tile(np.arange(slots, dtype=np.int32), (ranks, 1))
    pieces = Pieces(*(np.zeros((ranks, slots, ranks), np.int32) for _ in Pieces._fields))
    of_pair, sent = np.zeros((ranks, ranks), np.int64), np.zeros(ranks, np.int64)
    for rank, slot in np.argwhere(before != after):
        expert = after[rank, slot]
        here = np.flatnonzero(before[rank] == expert)
        if len(here):
            local[rank, slot] = here[0]
            continue
        holders, at = np.nonzero(before == expert)
        best = np.lexsort((sent[holders], of_pair[holders, rank]))[0]
        source, number = holders[best], of_pair[holders[best], rank]
        pieces.starts[source, number, rank] = at[best]
        pieces.sizes[source, number, rank] = 1
        pieces.targets[source, number, rank] = slot
        pieces.arriving[rank, number, source] = 1
        of_pair[source, rank] += 1
        sent[source] += 1
    return Moves(local, pieces, np.array(of_pair.max(), np.int32))
