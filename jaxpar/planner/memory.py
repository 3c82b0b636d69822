"""The bytes that a rank needs for a plan, by item, in closed form: nothing is built, so that thousands are counted."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from jaxpar.attention.planes import planes_of
from jaxpar.checkpoint.config import ModelConfig
from jaxpar.engine.prefill import prefill_steps
from jaxpar.engine.sizes import eighths, lanes_of, pages_of
from jaxpar.ledger.held import Held
from jaxpar.pipeline.stages import slots_of
from jaxpar.plan import Plan
from jaxpar.plan_checks import DTYPES
from jaxpar.planner.assumptions import NUMBER_BYTES, Assumptions
from jaxpar.planner.buffers import buffers_of
from jaxpar.planner.rates import framework_of
from jaxpar.planner.weights import Weights, weights_of
from jaxpar.planner.workload import Workload
from jaxpar.presets import DeviceKind
from jaxpar.strategies import Step

WEIGHT_ITEMS = ("attention weights", "FFN weights", "expert weights", "routers", "vocabulary", "norms")


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of the fullest rank, each item by name, and what the device has.

    Items: those of `WEIGHT_ITEMS` that the model has ("norms" with biases), "KV cache", "activations",
    "dispatch buffers" of experts, "framework" and "reserve".
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
        """The name of the largest item besides the reserve."""
        return max((name for name in self.items if name != "reserve"), key=lambda name: self.items[name])


def memory_of(
    config: ModelConfig, plan: Plan, device: DeviceKind, workload: Workload, assumed: Assumptions, batch: int
) -> DeviceMemory:
    """What `batch` requests of a workload in all take, each grown to its full length.

    Raises:
        PlanError: a plan that the model cannot have.
    """
    weights = _weights(config, plan)
    wide = DTYPES[plan.dtype]
    matrix = NUMBER_BYTES[assumed.weight_dtype or plan.dtype]
    of_prefill, of_decode = (
        _prefill_buffers(config, plan, device, workload),
        _decode_buffers(config, plan, device, workload, batch),
    )
    return DeviceMemory(
        {
            **weights.bytes(matrix, wide),
            "KV cache": cache_of(config, plan, workload.longest, assumed, batch),
            "activations": max(of_prefill[0], of_decode[0]),
            **({"dispatch buffers": max(of_prefill[1], of_decode[1])} if config.has_experts else {}),
            "framework": round(framework_of(device, assumed)),
            "reserve": round(assumed.reserve * device.memory_bytes),
        },
        device.memory_bytes,
    )


def cache_of(config: ModelConfig, plan: Plan, tokens: int, assumed: Assumptions, batch: int) -> int:
    """Bytes of a rank's pool of pages for `batch` requests in all of `tokens` each, rounded as the engine has it."""
    requests = -(-batch // (plan.mesh.dp * plan.mesh.ep))
    pages = eighths(requests * _pages(plan, tokens))
    planes = planes_of(config, plan)
    values = sum(plane.size * (plane.heads // plan.mesh.extent(plane.split)) for plane in planes)
    slots = len(slots_of(config, plan))
    return round(pages * plan.page_size * values * slots * NUMBER_BYTES[assumed.kv_dtype or plan.dtype])


def most_requests(config: ModelConfig, plan: Plan, device: DeviceKind, workload: Workload, assumed: Assumptions) -> int:
    """The most requests in all whose cache fits besides everything else; 0 where the weights alone do not fit.

    Of the numbers of lanes that the engine runs: 1, 2, 4, 8 and multiples of 8 on each replica.
    """
    replicas = plan.mesh.dp * plan.mesh.ep

    def left(lanes: int) -> int:
        return -memory_of(config, plan, device, workload, assumed, lanes * replicas).over

    if left(8) < 0:
        return max((lanes for lanes in (1, 2, 4) if left(lanes) >= 0), default=0) * replicas
    # Bytes are nearly a line in the number of lanes: look where it ends, then near there.
    each = max((left(8) - left(64)) / 56, 1.0)
    lanes = 8 * max(1, int(left(8) / each / 8) + 1)
    while lanes > 8 and left(lanes) < 0:
        lanes -= 8 * max(1, int(-left(lanes) / each / 8))
    lanes, step = max(lanes, 8), 8
    while left(lanes + step) >= 0:
        lanes, step = lanes + step, 2 * step
    while step > 8:
        step //= 2
        lanes += step if left(lanes + step) >= 0 else 0
    return lanes * replicas


@lru_cache(maxsize=4096)
def _weights(config: ModelConfig, plan: Plan) -> Weights:
    return weights_of(config, plan)


@lru_cache(maxsize=4096)
def _pages(plan: Plan, tokens: int) -> int:
    """Pages of one request on the rank of cp that has most of it."""
    return pages_of(Held("prefill", 1, tokens, plan).each(tokens)[0], plan)


@lru_cache(maxsize=4096)
def _keys(plan: Plan, tokens: int) -> int:
    """Positions that page tables list of a request of so many tokens."""
    return Held("prefill", 1, tokens, plan).keys(tokens)


def _decode_buffers(
    config: ModelConfig, plan: Plan, device: DeviceKind, workload: Workload, batch: int
) -> tuple[int, int]:
    """Of the longest context; its page tables are as wide as the longest request needs."""
    step = Step(config, plan, "decode", lanes_of(batch, plan), 1, _keys(plan, workload.longest)).batches[0]
    return buffers_of(step, device)


@lru_cache(maxsize=4096)
def _prefill_buffers(config: ModelConfig, plan: Plan, device: DeviceKind, workload: Workload) -> tuple[int, int]:
    """Of the last chunk of a prompt, one on each replica."""
    taken = max(prefill_steps([workload.fresh], plan), key=lambda step: step.tokens)
    keys = _keys(plan, workload.input)
    return buffers_of(Step(config, plan, "prefill", taken.lanes, taken.tokens, keys).batches[0], device)
