"""Items on their way through the stages: each call of the step program is one tick, in which every stage has another.

    tick       0   1   2   3   4   5          an item enters stage 0, and leaves the last stage pp - 1 ticks later
    stage 0    a   b   c   .   .   .
    stage 1    .   a   b   c   .   .          . idle: a batch of padding
    stage 2    .   .   a   b   c   .

Without pp there is one stage, and an item leaves in the tick in which it enters.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxpar.batch import StepBatch, StepOutput
from jaxpar.engine.room import room_of
from jaxpar.plan import Phase
from jaxpar.program import Programs, Weights
from jaxpar.strategies import Step


@dataclass(frozen=True)
class Item:
    """A batch of all replicas, arrays [dp * ep * lanes, ...], with what its sender wants to know when it leaves.

    In prefill `width` tokens of a lane on each rank of cp.
    """

    batch: StepBatch
    width: int
    note: Any


@dataclass(frozen=True)
class Left:
    """An item that has left the last stage: its output, in which its lanes begin at row `first`.

    `width` are the tokens of a lane on a rank of cp in the tick in which it left, its own or more.
    """

    item: Item
    output: StepOutput
    first: int
    width: int


class Pipe:
    """The stages with what they work on, the cache, and what has been counted of them."""

    def __init__(self, programs: Programs, weights: Weights, pages: int) -> None:
        """Make the cache; no stage has anything to do."""
        self._programs, self._weights = programs, weights
        self._cache = programs.empty_cache(pages)
        self._stages: deque[Item | None] = deque([None] * programs.plan.mesh.pp)
        self._kind: tuple[Any, ...] | None = None
        self.ticks = 0
        self.idle = 0
        """Ticks of single stages in which they had no item; of `ticks * pp`."""

    @property
    def is_empty(self) -> bool:
        """Whether no item is under way."""
        return not any(self._stages)

    def tick(self, phase: Phase, item: Item | None, keys: int, logits: bool, sampled: bool) -> Left | None:
        """Let an item enter, or none, and every stage work -> the item that leaves.

        Items that are under way together are of one phase and kind, and have as many lanes.

        Args:
            phase: of all items.
            item: what enters.
            keys: positions of each request that the page tables list.
            logits: whether logits of every token come out.
            sampled: whether any lane draws its token.
        """
        plan, stages = self._programs.plan, self._stages
        stages.pop()
        stages.appendleft(item)
        held = [one for one in stages if one is not None]
        ranks = plan.mesh.cp if phase == "prefill" else 1
        width = max(one.width for one in held)
        table = keys // plan.page_size
        shaped = [_shaped(held[0] if one is None else one, one is None, ranks, width, table) for one in stages]
        batch: StepBatch = jax.tree.map(lambda *parts: np.concatenate(parts), *shaped)
        lanes = len(held[0].batch.positions) // (plan.mesh.dp * plan.mesh.ep)
        step = Step(self._programs.config, plan, phase, lanes, width, keys, logits, sampled)
        real = (batch.positions >= 0).reshape(-1, ranks, width).sum(axis=2)
        program = self._programs.step(phase, logits, sampled, room_of(real, step))
        cache = self._programs.flow.into(self._cache, step, fresh=(phase, lanes) != self._kind)
        self._kind = phase, lanes
        self._cache, output = program(self._weights, cache, batch)
        self._programs.note(output)
        self.ticks += 1
        self.idle += len(stages) - len(held)
        # What leaves is no longer under way.
        last, stages[-1] = stages[-1], None
        return None if last is None else Left(last, output, (len(stages) - 1) * len(last.batch.positions), width)


def _shaped(item: Item, idle: bool, ranks: int, width: int, table: int) -> StepBatch:
    """The item's batch at the sizes of a tick, or a batch of the same shapes in which no lane does anything."""
    batch = item.batch
    if idle:
        batch = batch._replace(
            tokens=np.zeros_like(batch.tokens),
            positions=np.full_like(batch.positions, -1),
            table=np.full_like(batch.table, -1),
        )

    def widened(x: np.ndarray, value: int) -> np.ndarray:
        by_rank = x.reshape(len(x), ranks, item.width)
        more = ((0, 0), (0, 0), (0, width - item.width))
        return np.pad(by_rank, more, constant_values=value).reshape(len(x), ranks * width)

    pages = batch.table[:, :table]
    return batch._replace(
        tokens=widened(batch.tokens, 0),
        positions=widened(batch.positions, -1),
        last=batch.last // item.width * width + batch.last % item.width,
        table=np.pad(pages, ((0, 0), (0, table - pages.shape[1])), constant_values=-1),
    )
