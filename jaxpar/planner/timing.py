"""How long a step, a prompt and a token take: what the planner compares plans by.

    time to first token = queue + prefill + transfer        time per output token = the ticks between two of its tokens

Over pp a step is a tick, in which every stage works on another item, and all wait for the slowest: m items take
m + p - 1 ticks, of which (p - 1) / (m + p - 1) are the bubble.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from jaxpar.attention.planes import values_a_token
from jaxpar.checkpoint.config import ModelConfig
from jaxpar.engine.prefill import prefill_steps
from jaxpar.engine.sizes import groups_in, lanes_of, local_tokens, table_width
from jaxpar.ledger.needed import Context
from jaxpar.plan import Plan
from jaxpar.planner.assumptions import NUMBER_BYTES, Assumptions
from jaxpar.planner.overlap import hide, together
from jaxpar.planner.rates import rates_of
from jaxpar.planner.roofline import Part, parts_of, predicted, sent_over
from jaxpar.planner.stages import slowest_stage
from jaxpar.planner.workload import Workload
from jaxpar.presets import DeviceKind
from jaxpar.strategies import Step

__all__ = ["DecodeTime", "Part", "PrefillTime", "StepTime", "decode_time", "prefill_time", "step_time"]


@dataclass(frozen=True)
class StepTime:
    """A step on its slowest stage, by parts in the order of the forward pass; `overhead` is the host's."""

    step: Step
    parts: tuple[Part, ...]
    overhead: float

    @cached_property
    def seconds(self) -> float:
        """The whole step."""
        return sum(part.seconds for part in self.parts) + self.overhead

    @property
    def bound(self) -> str:
        """What bounds most of its seconds: "compute", "memory", "latency", "host", or the axes that it sends over."""
        return max(self.bounds, key=lambda name: self.bounds[name])

    @cached_property
    def bounds(self) -> dict[str, float]:
        """Its seconds by what takes them: the longer one of compute and memory of each part, kernels, axes."""
        found: dict[str, float] = defaultdict(float)
        for part in self.parts:
            found["compute" if part.compute > part.memory else "memory"] += max(part.compute, part.memory)
            found["latency"] += part.kernels
            for axes, seconds in part.sending:
                found["+".join(axes)] += seconds * (1 - part.hidden / part.sent if part.sent else 0)
        found["host"] += self.overhead
        return dict(found)

    @cached_property
    def sending(self) -> dict[tuple[str, ...], float]:
        """Seconds of collectives by the axes that they run over, hidden ones among them."""
        found: dict[tuple[str, ...], float] = defaultdict(float)
        for part in self.parts:
            for axes, seconds in part.sending:
                found[axes] += seconds
        return dict(found)

    @property
    def flops(self) -> float:
        """Of the fullest rank."""
        return sum(part.flops for part in self.parts)

    def to_json(self) -> dict[str, Any]:
        """Seconds of every part, and what they are of, as plain data."""
        return {
            "lanes": self.step.lanes,
            "tokens": self.step.tokens,
            "seconds": self.seconds,
            "bound": self.bound,
            "overhead": self.overhead,
            "parts": [
                {
                    "name": part.name,
                    "flops": part.flops,
                    "bytes": part.bytes,
                    "compute": part.compute,
                    "memory": part.memory,
                    "kernels": part.kernels,
                    "sending": {"+".join(axes): seconds for axes, seconds in part.sending},
                    "hidden": part.hidden,
                    "seconds": part.seconds,
                    "bound": part.bound,
                }
                for part in self.parts
            ],
        }


@dataclass(frozen=True)
class PrefillTime:
    """What comes before the first token, in seconds: `queue`, then `prefill`, then `transfer` to another pool.

    `steps` are the chunks with how often each runs; of `prefill` `bubble` is what stages wait to fill and drain.
    """

    steps: tuple[tuple[StepTime, int], ...]
    prefill: float
    bubble: float
    queue: float = 0.0
    transfer: float = 0.0

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return self.queue + self.prefill + self.transfer

    def to_json(self) -> dict[str, Any]:
        """Every figure as plain data."""
        steps = [step.to_json() | {"count": count} for step, count in self.steps]
        times = {name: getattr(self, name) for name in ("queue", "prefill", "transfer", "bubble", "ttft")}
        return {**times, "steps": steps}


@dataclass(frozen=True)
class DecodeTime:
    """One token of every request: `step` of a group of them, `ticks` of which follow until a request has its next."""

    step: StepTime
    ticks: int
    batch: int

    @property
    def tpot(self) -> float:
        """Time per output token of a request, in seconds."""
        return self.step.seconds * self.ticks

    @property
    def tokens_per_second(self) -> float:
        """Of all requests together."""
        return self.batch / self.tpot

    def to_json(self) -> dict[str, Any]:
        """Every figure as plain data."""
        return {"tpot": self.tpot, "ticks": self.ticks, "batch": self.batch, "step": self.step.to_json()}


def step_time(step: Step, device: DeviceKind, assumed: Assumptions, *, seen: int | None = None) -> StepTime:
    """How long a step takes on `device`, as the ledger counts it.

    Args:
        step: what each rank works on; its plan has the mesh and the strategies.
        device: of each rank.
        assumed: efficiencies and what overlaps.
        seen: tokens of each request that are cached before the step; None: as many as its page table has room for.

    Raises:
        PlanError: a strategy that refuses the step's shapes.
    """
    config, plan = step.config, step.plan
    fresh = step.tokens * (plan.mesh.cp if step.phase == "prefill" else 1)
    before = max(step.keys * plan.mesh.cp - fresh, 0) if seen is None else seen
    batch = step.batches[0]
    rows = predicted(batch, assumed.imbalance)
    parts = parts_of(batch, Context(before, fresh), rows, device, assumed)
    parts = slowest_stage(parts, config, plan)
    hops = sent_over((row for row in rows if row.collective == "ppermute"), batch, device)
    ringed = {name: sum(seconds for _, seconds in axes) for name, axes in hops.items()}
    parts = hide(batch, parts, ringed, assumed.overlap)
    if len(step.batches) == 2:
        parts = together(parts, batch.layers, assumed.overlap)
    return StepTime(step, tuple(parts), rates_of(device, assumed, plan.dtype).step)


def prefill_time(
    config: ModelConfig, plan: Plan, device: DeviceKind, workload: Workload, assumed: Assumptions, batch: int = 1
) -> PrefillTime:
    """All chunks of `batch` prompts that are prefilled together, until the last stage has the last of them.

    Raises:
        PlanError: a strategy that refuses the shapes.
    """
    items = []
    for taken in prefill_steps([workload.fresh] * batch, plan):
        before = workload.prefix + taken.offset
        keys = table_width(local_tokens(min(before + taken.size, workload.input), plan), plan) * plan.page_size
        step = Step(config, plan, "prefill", taken.lanes, taken.tokens, keys)
        items.append(_timed(step, device, assumed, before))
    stages = plan.mesh.pp
    ticks = [max(items[max(0, at - stages + 1) : at + 1], key=lambda one: one.seconds) for at in range(len(items))]
    # While the pipeline drains the last items are still in it.
    ticks += [max(items[-(stages - drained) :], key=lambda one: one.seconds) for drained in range(1, stages)]
    prefill = sum(tick.seconds for tick in ticks)
    chunks = tuple((item, items.count(item)) for item in dict.fromkeys(items))
    return PrefillTime(chunks, prefill, prefill - sum(item.seconds for item in items))


def decode_time(
    config: ModelConfig, plan: Plan, device: DeviceKind, workload: Workload, assumed: Assumptions, batch: int
) -> DecodeTime:
    """A decode step of `batch` requests in all, at the mean context of their output.

    Raises:
        PlanError: a strategy that refuses the shapes.
    """
    context = workload.mean_context
    keys = table_width(-(-(context + 1) // plan.mesh.cp), plan) * plan.page_size
    step = Step(config, plan, "decode", lanes_of(batch, plan), 1, keys)
    ticks = max(groups_in(batch, plan), plan.mesh.pp)
    return DecodeTime(_timed(step, device, assumed, context), ticks, batch)


def transfer_seconds(
    config: ModelConfig, plan: Plan, device: DeviceKind, workload: Workload, assumed: Assumptions
) -> float:
    """Seconds in which the cache of one prompt goes from the devices of a prefill replica to a decode pool.

    Each rank sends what it holds, copies among ranks of tp once: pages of cp, layers of pp, heads of tp go at once.
    """
    bandwidth = assumed.transfer_bandwidth or device.internode_bandwidth
    sharing = plan.mesh.pp * plan.mesh.cp * min(plan.mesh.tp, 1 if config.mla else config.num_key_value_heads)
    whole = cache_bytes(config, workload.input, assumed, plan.dtype)
    return device.internode_latency + whole / sharing / bandwidth


def cache_bytes(config: ModelConfig, tokens: int, assumed: Assumptions, dtype: str) -> float:
    """Bytes of the keys and values, or latents, of so many tokens of a request in all layers, without copies."""
    values = tokens * config.num_hidden_layers * values_a_token(config, Plan())
    return values * NUMBER_BYTES[assumed.kv_dtype or dtype]


@lru_cache(maxsize=4096)
def _timed(step: Step, device: DeviceKind, assumed: Assumptions, seen: int) -> StepTime:
    return step_time(step, device, assumed, seen=seen)
