"""The bytes that a rank needs for a plan, by item, in closed form: nothing is built, so that thousands are counted."""

from __future__ import annotations

from dataclasses import dataclass

from jaxpar.checkpoint.config import ModelConfig
from jaxpar.plan import Plan
from jaxpar.planner.assumptions import Assumptions
from jaxpar.planner.workload import Workload
from jaxpar.presets import DeviceKind


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of the fullest rank, each item by name, and what the device has.

    Items: "attention weights", "FFN weights", "expert weights", "vocabulary", "norms", "KV cache", "activations",
    "dispatch buffers", "framework", "reserve".
    """

    items: dict[str, int]
    device_bytes: int

    @property
    def weight_bytes(self) -> int:
        """All weights, as they are sharded."""
        return sum(size for name, size in self.items.items() if name in WEIGHT_ITEMS)

    @property
    def cache_bytes(self) -> int:
        """The KV cache of all requests."""
        return self.items["KV cache"]

    @property
    def total(self) -> int:
        """Everything together, the reserve among it."""
        return sum(self.items.values())

    @property
    def fits(self) -> bool:
        """Whether the device has it."""
        return self.total <= self.device_bytes

    @property
    def over(self) -> int:
        """Bytes that are too many; below 0: that are left."""
        return self.total - self.device_bytes

    @property
    def largest(self) -> str:
        """The name of the largest item."""
        return max(self.items, key=lambda name: self.items[name])


WEIGHT_ITEMS = ("attention weights", "FFN weights", "expert weights", "vocabulary", "norms")


def memory_of(
    config: ModelConfig, plan: Plan, device: DeviceKind, workload: Workload, assumed: Assumptions, batch: int
) -> DeviceMemory:
    """What `batch` requests of a workload in all take, each grown to its full length.

    Raises:
        PlanError: a plan that the model cannot have.
    """
    raise NotImplementedError


def most_requests(config: ModelConfig, plan: Plan, device: DeviceKind, workload: Workload, assumed: Assumptions) -> int:
    """The most requests in all whose cache fits besides everything else; 0 where the weights alone do not fit."""
    raise NotImplementedError
