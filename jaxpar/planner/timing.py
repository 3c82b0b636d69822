"""How long a step, a prompt and a token take: what the planner compares plans by.

time to first token = queue + prefill + transfer        time per output token = a decode step's seconds
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxpar.checkpoint.config import ModelConfig
from jaxpar.plan import Plan
from jaxpar.planner.assumptions import Assumptions
from jaxpar.planner.workload import Workload
from jaxpar.presets import DeviceKind
from jaxpar.strategies import Step


@dataclass(frozen=True)
class Part:
    """Seconds of one part of a step, on the slowest rank, all layers of a stage together.

    `compute` are those that its FLOPs take and `memory` those that its bytes take: the longer one counts. `sending`
    are (axes, seconds) of its collectives, of which `hidden` seconds run beside something that computes.
    """

    name: str
    flops: float
    bytes: float
    compute: float
    memory: float
    kernels: float
    sending: tuple[tuple[tuple[str, ...], float], ...] = ()
    hidden: float = 0.0

    @property
    def working(self) -> float:
        """Seconds of the device itself."""
        return max(self.compute, self.memory) + self.kernels

    @property
    def sent(self) -> float:
        """Seconds of all its collectives, one after another."""
        return sum(seconds for _, seconds in self.sending)

    @property
    def seconds(self) -> float:
        """What it adds to the step."""
        return self.working + self.sent - self.hidden

    @property
    def bound(self) -> str:
        """What takes the most of it: compute, memory, latency of kernels, or the axes that are sent over."""
        exposed = self.sent - self.hidden
        most = max(self.compute, self.memory, self.kernels, exposed)
        if most == exposed and exposed > 0:
            return "+".join(max(self.sending, key=lambda item: item[1])[0])
        if most == self.kernels and self.kernels > 0:
            return "latency"
        return "compute" if most == self.compute else "memory"


@dataclass(frozen=True)
class StepTime:
    """A step on its slowest stage, by parts in the order of the forward pass; `overhead` is the host's."""

    step: Step
    parts: tuple[Part, ...]
    overhead: float

    @property
    def seconds(self) -> float:
        """The whole step."""
        return sum(part.seconds for part in self.parts) + self.overhead

    @property
    def bound(self) -> str:
        """What bounds most of its seconds."""
        raise NotImplementedError

    @property
    def sending(self) -> dict[tuple[str, ...], float]:
        """Seconds of collectives by the axes that they run over, hidden ones among them."""
        raise NotImplementedError


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


def step_time(step: Step, device: DeviceKind, assumed: Assumptions, *, seen: float | None = None) -> StepTime:
    """How long a step takes on `device`, as the ledger counts it.

    Args:
        step: what each rank works on; its plan has the mesh, the strategies and the nodes.
        device: of each rank.
        assumed: efficiencies and what overlaps.
        seen: tokens of context that a request really has in decode, or that came before this chunk in prefill; the
            page table (`step.keys`), which is larger, if it is None.

    Raises:
        PlanError: a strategy that refuses the step's shapes.
    """
    raise NotImplementedError


def prefill_time(
    config: ModelConfig, plan: Plan, device: DeviceKind, workload: Workload, assumed: Assumptions, batch: int = 1
) -> PrefillTime:
    """All chunks of `batch` prompts that are prefilled together, until the last stage has the last of them.

    Raises:
        PlanError: a strategy that refuses the shapes.
    """
    raise NotImplementedError


def decode_time(
    config: ModelConfig, plan: Plan, device: DeviceKind, workload: Workload, assumed: Assumptions, batch: int
) -> DecodeTime:
    """A decode step of `batch` requests in all, at the mean context of their output.

    Raises:
        PlanError: a strategy that refuses the shapes.
    """
    raise NotImplementedError


def transfer_seconds(
    config: ModelConfig, plan: Plan, device: DeviceKind, workload: Workload, assumed: Assumptions
) -> float:
    """Seconds in which the cache of one prompt goes from the devices of a prefill replica to a decode pool."""
    raise NotImplementedError


def to_json(value: PrefillTime | DecodeTime | StepTime) -> dict[str, Any]:
    """Seconds and what they are of, as plain data."""
    raise NotImplementedError
