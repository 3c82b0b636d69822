"""A deployment and what it is worth: a plan with its batch, or two for separate pools, with all that was counted."""

from __future__ import annotations

from dataclasses import dataclass

from jaxpar.plan import Plan
from jaxpar.planner.memory import DeviceMemory
from jaxpar.planner.serving import Served
from jaxpar.planner.timing import DecodeTime, PrefillTime
from jaxpar.planner.workload import Targets


@dataclass(frozen=True)
class Pool:
    """Devices that run one plan, with up to `batch` requests on all of them, and the memory of the fullest."""

    plan: Plan
    batch: int
    memory: DeviceMemory

    @property
    def devices(self) -> int:
        """Of all replicas."""
        return self.plan.mesh.size

    @property
    def replicas(self) -> int:
        """Ranks of requests: each has requests of its own."""
        return self.plan.mesh.dp * self.plan.mesh.ep

    @property
    def used_bytes(self) -> int:
        """Bytes of the fullest device, without the reserve that stays free."""
        return self.memory.total - self.memory.items["reserve"]

    @property
    def lanes(self) -> int:
        """Requests of the fullest replica."""
        return -(-self.batch // self.replicas)


@dataclass(frozen=True)
class Estimate:
    """One pool for both phases, or one that prefills and one that decodes; times are in seconds.

    `output` are the tokens of a request, the first of which prefill makes.
    """

    pools: tuple[Pool, ...]
    prefill: PrefillTime
    decode: DecodeTime
    served: Served
    output: int

    @property
    def apart(self) -> bool:
        """Whether prefill and decode have pools of their own."""
        return len(self.pools) > 1

    @property
    def plan(self) -> Plan:
        """Of the devices that decode."""
        return self.pools[-1].plan

    @property
    def batch(self) -> int:
        """Requests under way at once."""
        return self.pools[-1].batch

    @property
    def devices(self) -> int:
        """Of all pools."""
        return sum(pool.devices for pool in self.pools)

    @property
    def fits(self) -> bool:
        """Whether every device has the memory."""
        return all(pool.memory.fits for pool in self.pools)

    @property
    def fullest(self) -> DeviceMemory:
        """The memory of the pool with the least left."""
        return max((pool.memory for pool in self.pools), key=lambda memory: memory.over)

    @property
    def ttft(self) -> float:
        """Seconds to the first token: queue, prefill and transfer."""
        return self.served.first.total

    @property
    def tpot(self) -> float:
        """Seconds between two tokens of a request."""
        return self.served.tpot

    @property
    def latency(self) -> float:
        """Seconds from a request to its last token."""
        return self.ttft + (self.output - 1) * self.tpot

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens of all requests."""
        return self.served.rate * self.output

    @property
    def tokens_per_device(self) -> float:
        """Generated tokens a second of each device."""
        return self.tokens_per_second / self.devices

    @property
    def tokens_per_user(self) -> float:
        """Tokens a second of one request, once its first has come."""
        return 1 / self.tpot

    @property
    def device_seconds(self) -> float:
        """Devices x seconds for each generated token: what it costs."""
        return self.devices / self.tokens_per_second

    def miss(self, targets: Targets) -> float:
        """By which factor the worse of the targets is missed; 1: all are met."""
        ratios = [1.0]
        if targets.ttft is not None:
            ratios.append(self.ttft / targets.ttft)
        if targets.tpot is not None:
            ratios.append(self.tpot / targets.tpot)
        return max(ratios)
