"""What the stages of a pipeline send on, over all boundaries together, and how much of it is of use.

stage 0      stage 1      stage 2        an item crosses pp - 1 boundaries, and every boundary is crossed in every
|- item 1 ->|- item 0 ->|              tick: by an item with its padding, or by nothing but padding
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from jaxpar.engine.ticks import Tick, kept_width
from jaxpar.strategies import Step


class Boundaries(NamedTuple):
    """Bytes of the first rank of every other axis: replica, cp and tp, on all stages that send.

    `items` cross `hops` boundaries each. Of the `sent_bytes` of all ticks `unused_bytes` are padding of items and ticks
    in which a stage has none.
    """

    hops: int
    items: int
    sent_bytes: int
    unused_bytes: int


def boundaries_of(items: Sequence[Tick], steps: Sequence[Step]) -> Boundaries:
    """Count what `steps`, the ticks in which `items` go through stages, send from stage to stage."""
    hops, row_bytes = steps[0].plan.mesh.pp - 1, steps[0].row_bytes
    sent = sum(step.passed_rows for step in steps)
    widest = kept_width([item.tokens for item in items], steps[0].plan)
    used = sum(_used_rows(item, replace(steps[0], tokens=max(item.tokens, widest))) for item in items)
    return Boundaries(hops, len(items), hops * sent * row_bytes, hops * (sent - used) * row_bytes)


def _used_rows(item: Tick, step: Step) -> int:
    """Rows of an item that are no padding, of those that the first rank passes on."""
    is_real = np.arange(step.tokens) < item.real[: item.lanes, :1]
    return int(is_real.reshape(-1)[: step.passed_rows].sum())
