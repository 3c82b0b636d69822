"""The steps of the program that items take, in sizes: with stages, each step is a tick in which several are under way.

The engine runs these ticks one by one (`engine/pipe.py`), and the ledger counts them without running any.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxpar.plan import Plan


class Tick(NamedTuple):
    """Sizes of an item, or of a step of the program, in which all stages have the same.

    `lanes` of a replica and stage, `tokens` of a lane on each rank of cp, `keys` that page tables list; `real` are the
    tokens of each lane on each rank of cp that are no padding [lanes of all stages and replicas, cp], [.., 1] in
    decode.
    """

    lanes: int
    tokens: int
    keys: int
    real: np.ndarray


def kept_width(widths: Iterable[int], plan: Plan) -> int:
    """The least tokens of a lane in a tick, of items that have so many: slices of rows cannot change size on the way.

    Where stages pass on whole lanes their widths follow the items, and this is 0.
    """
    return max(widths) if plan.pipeline and plan.row_slices("prefill") else 0


def all_ticks(items: Sequence[Tick], plan: Plan) -> Iterator[Tick]:
    """The ticks in which items go through empty stages one after another, until these are empty again."""
    stages, keys = plan.mesh.pp, 0
    widest = kept_width([item.tokens for item in items], plan)
    for tick in range(len(items) + stages - 1):
        held = [items[tick - stage] if 0 <= tick - stage < len(items) else None for stage in range(stages)]
        keys = max([keys, *(item.keys for item in held if item is not None)])
        yield _together(held, keys, widest)


def round_of_ticks(items: Sequence[Tick], plan: Plan) -> Iterator[Tick]:
    """The ticks between one token of each group and the next, where groups follow one another without end."""
    stages = plan.mesh.pp
    turns = max(len(items), stages)
    for tick in range(turns):
        turn = [(tick - stage) % turns for stage in range(stages)]
        yield _together([items[at] if at < len(items) else None for at in turn], items[0].keys)


def _together(held: Sequence[Tick | None], keys: int, widest: int = 0) -> Tick:
    """The step in which the stages have these items, or nothing to do."""
    items = [item for item in held if item is not None]
    nothing = np.zeros_like(items[0].real)
    real = np.concatenate([nothing if item is None else item.real for item in held])
    return Tick(items[0].lanes, max([widest, *(item.tokens for item in items)]), keys, real)
