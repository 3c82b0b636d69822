"""One long prompt, chunk by chunk through the stages of a model: what each way to cut it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from jaxpar.checkpoint.config import ModelConfig
from jaxpar.engine.sizes import prefill_chunks
from jaxpar.errors import PlanError
from jaxpar.pipeline.chunks import equal_cost_ends, rounded, share_of_attention
from jaxpar.pipeline.costs import attention_flops, by_stage, parity, weight_flops
from jaxpar.pipeline.stages import layers_of_stages
from jaxpar.pipeline.timetable import Schedule, Timetable, free_running, lockstep, prefill_timetable
from jaxpar.plan import Plan


@dataclass(frozen=True)
class Chunked:
    """A prompt in chunks: `firsts` and `sizes` [m] in tokens, and what each costs each stage, `costs` [m, p] in FLOPs.

    Three schedules: `free_running` stages, those in `lockstep`, and `padded` ones, as they run in one program: in each
    tick every stage works on as many tokens as the largest chunk in flight has, and on as many layers as the fullest
    stage; attention skips what is padding.
    """

    firsts: list[int]
    sizes: list[int]
    costs: np.ndarray
    timetable: Timetable
    free_running: Schedule
    lockstep: Schedule
    padded: Schedule

    @property
    def schedules(self) -> dict[str, Schedule]:
        """By the name that a report gives them."""
        return {"free-running": self.free_running, "lock-step": self.lockstep, "one program": self.padded}

    def idle_share(self, schedule: Schedule) -> float:
        """The part of all stages' time in which they do nothing that a chunk needs."""
        return float(1 - self.costs.sum() / (self.costs.shape[1] * schedule.duration))


def in_chunks(config: ModelConfig, plan: Plan, chunks: Sequence[int], length: int) -> Chunked:
    """Prefill `length` tokens in chunks with room for so many each, through the stages of `plan`.

    Raises:
        PlanError: more tokens than the model's context, or stages that the model does not have.
    """
    if not 1 <= length <= config.max_position_embeddings:
        raise PlanError(
            f"a prompt of {length} tokens: the model's context has {config.max_position_embeddings}; "
            "ask for 1 to so many"
        )
    layers = layers_of_stages(config, plan)
    firsts = [*accumulate(chunks[:-1], initial=0)]
    sizes = [min(size, length - first) for first, size in zip(firsts, chunks, strict=True)]
    weights = by_stage(weight_flops(config), layers)
    attention = np.stack(
        [by_stage(attention_flops(config, first, size), layers) for first, size in zip(firsts, sizes, strict=True)]
    )
    costs = np.outer(sizes, weights) + attention
    timetable = prefill_timetable(len(chunks), len(layers))
    return Chunked(
        firsts=firsts,
        sizes=sizes,
        costs=costs,
        timetable=timetable,
        free_running=free_running(timetable, costs),
        lockstep=lockstep(timetable, costs),
        padded=lockstep(timetable, np.outer(chunks, np.full(len(layers), weights.max())), attention),
    )


def three_ways(config: ModelConfig, plan: Plan, length: int) -> tuple[int, dict[str, Chunked]]:
    """The `chunk_parity` of a model, and its prompt in "equal", in "equal cost" and in "levelled" chunks.

    Raises:
        PlanError: as `in_chunks`.
    """
    at = parity(config, plan.chunk)
    equal = [size for _, size in prefill_chunks(length, replace(plan, chunk_parity=0))]
    levelled = [size for _, size in prefill_chunks(length, replace(plan, chunk_parity=at))]
    ends = equal_cost_ends(length, len(equal), share_of_attention(length, at) if at else 0)
    equal_cost = rounded(ends, length, plan.chunk) if at else equal
    ways = {"equal": equal, "equal cost": equal_cost, "levelled": levelled}
    return at, {name: in_chunks(config, plan, chunks, length) for name, chunks in ways.items()}
