"""Statistics of experts over the steps of a run: who gets how many tokens, how evenly, and whether that changes.

    steps     1 2 3 4 | 5 6 7 8
    halves    p       | q             drift = the sum of |p - q| / 2 over experts: the part of the tokens that moved

Over stages ticks are counted. In one tick layers of different stages have different tokens, and a token's layers fall
into ticks that follow one another: of tokens under way at the cut the first half has the layers of the first stages
only, and the second half the others.

Steps count on their devices in any case; here the counts are kept and read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxpar.batch import StepOutput
from jaxpar.errors import PlanError
from jaxpar.moe.balance import device_loads, over_mean
from jaxpar.moe.placement import first_slots
from jaxpar.profile import ProfileSummary
from jaxpar.program import Programs

HOTTEST = 4
"""Experts that are named as the hottest of a layer."""

_UNREAD = 64


@dataclass(frozen=True)
class TimeShares:
    """Parts of the mean device's time from its first operation to its last: in dispatch, and in the experts."""

    dispatch: float
    experts: float


@dataclass(frozen=True)
class ExpertStats:
    """Of each of L layers with E experts over P ranks, in tokens; a token counts once for each expert that it chose.

    `steps` have run, with more than one of `stages` each of them a tick of all. `halves` [2, L, E] are the loads of the
    experts in the first and in the second half of the steps, cut at the same step for all layers, `rank_loads`
    [L, P] those of ranks, where the experts lay in each step and copies share evenly; `dropped` the rows for which
    `moe_capacity` had no room; `time` None where no profile was taken.
    """

    steps: int
    stages: int
    halves: np.ndarray
    rank_loads: np.ndarray
    dropped: int
    time: TimeShares | None

    @property
    def unit(self) -> str:
        """What `steps` are: steps, or ticks of a pipeline."""
        return "step" if self.stages == 1 else "tick"

    @property
    def loads(self) -> np.ndarray:
        """Of every expert [L, E]."""
        loads: np.ndarray = self.halves.sum(axis=0)
        return loads

    @property
    def drift(self) -> np.ndarray:
        """Total variation distance of the halves' loads [L], from 0 to 1; NaN where a half has none."""
        totals = self.halves.sum(axis=2, keepdims=True)
        shares = np.divide(self.halves, totals, out=np.full(self.halves.shape, np.nan), where=totals > 0)
        drift: np.ndarray = np.abs(shares[0] - shares[1]).sum(axis=1) / 2
        return drift

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON types."""
        experts, ranks = over_mean(self.loads.astype(float)).max(axis=1), over_mean(self.rank_loads).max(axis=1)
        return {
            f"{self.unit}s": self.steps,
            "loads": self.loads.tolist(),
            "rank_loads": self.rank_loads.tolist(),
            "layers": [
                {
                    "layer": layer,
                    "mean_tokens_per_expert": float(loads.mean()),
                    "largest_over_mean_expert": float(experts[layer]),
                    "largest_over_mean_rank": float(ranks[layer]),
                    "hottest": hottest(loads),
                    "hottest_by_half": [hottest(half) for half in self.halves[:, layer]],
                    "drift": float(self.drift[layer]),
                }
                for layer, loads in enumerate(self.loads)
            ],
            "dropped_rows": self.dropped,
            "time_shares": None if self.time is None else vars(self.time),
        }


def hottest(loads: np.ndarray) -> list[int]:
    """The experts with the most tokens, the hottest first, HOTTEST at most; none without a token is among them."""
    best = np.argsort(-loads, kind="stable")[:HOTTEST]
    return [int(expert) for expert in best if loads[expert]]


class ExpertRecord:
    """The steps that have run in a `recorded` block; it holds a number for each expert of each step."""

    def __init__(self, programs: Programs, slots: Callable[[], np.ndarray]) -> None:
        """`slots` gives the expert of each slot now [L, slots]."""
        plan = programs.plan
        self._ranks, self._stages, self._slots = plan.mesh.extent(plan.experts), plan.mesh.pp, slots
        self._unread: list[tuple[Any, Any, np.ndarray]] = []
        self._steps: list[np.ndarray] = []
        self._rank_loads: list[np.ndarray] = []
        self._dropped = 0

    def after_step(self, output: StepOutput) -> None:
        """Keep what a step counted, on its devices."""
        self._unread.append((output.loads, output.dropped, self._slots()))
        if len(self._unread) > _UNREAD:
            self._read()

    def stats(self, profile: ProfileSummary | None = None) -> ExpertStats:
        """What the steps come to.

        Raises:
            PlanError: none has run.
        """
        self._read()
        if not self._steps:
            raise PlanError("no step has run while experts were recorded: generate inside the block")
        middle = -(-len(self._steps) // 2)
        steps = np.stack(self._steps)
        halves = np.stack([steps[:middle].sum(axis=0), steps[middle:].sum(axis=0)])
        time = None if profile is None else TimeShares(profile.share("moe_dispatch"), profile.share("experts"))
        ranks = np.sum(self._rank_loads, axis=0)
        return ExpertStats(len(self._steps), self._stages, halves, ranks, self._dropped, time)

    def _read(self) -> None:
        for counts, dropped, slots in self._unread:
            loads = np.asarray(counts).sum(axis=0, dtype=np.int64)
            self._steps.append(loads)
            self._rank_loads.append(device_loads(loads.astype(float), slots, self._ranks))
            self._dropped += 0 if dropped is None else int(np.asarray(dropped).sum())
        self._unread.clear()


def recorded(programs: Programs, slots: Callable[[], np.ndarray] | None) -> AbstractContextManager[ExpertRecord]:
    """Record the steps that `programs` run inside a `with` block.

    Args:
        programs: the model's.
        slots: gives the expert of each slot now; None: where the plan has them from the start.

    Raises:
        PlanError: the model has no experts.
    """
    moe = programs.config.moe
    if moe is None or not programs.config.has_experts:
        raise PlanError(f"this {programs.config.model_type} has no experts, of which there is nothing to record")
    in_order = np.tile(first_slots(moe, programs.plan), (sum(moe.layers), 1))
    return _watched(programs, ExpertRecord(programs, slots or (lambda: in_order)))


@contextmanager
def _watched(programs: Programs, record: ExpertRecord) -> Iterator[ExpertRecord]:
    # Before whoever moves experts: a step is counted with those placements with which it ran.
    programs.watchers.insert(0, record.after_step)
    try:
        yield record
    finally:
        programs.watchers.remove(record.after_step)
