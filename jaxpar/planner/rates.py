"""How fast a device works under some assumptions: a preset's figures, what it has measured, and what is typical."""

from __future__ import annotations

from dataclasses import dataclass

from jaxpar.planner.assumptions import EIGHT_BITS, NUMBER_BYTES, Assumptions
from jaxpar.presets import DeviceKind

TYPICAL_MATMUL = 0.75
TYPICAL_MEMORY = 0.8
TYPICAL_KERNEL = 3e-6
TYPICAL_FRAMEWORK = 2e9
TYPICAL = {
    "fp8_efficiency": ("fp8", 0.5),
    "attention_efficiency": ("attention", 0.3),
    "cache_efficiency": ("cache", 0.85),
    "expert_efficiency": ("experts", 0.45),
}
"""What engines reach on devices that nobody has measured here; with what a preset calls those that it may measure."""


@dataclass(frozen=True)
class Rates:
    """FLOP/s and bytes per second of a device as it really works, bytes of values, and seconds of each kernel."""

    matrices: float
    wide: float
    attention: float
    experts: float
    memory: float
    cache: float
    weight_bytes: float
    kv_bytes: float
    row_bytes: float
    kernel: float
    step: float


def rates_of(device: DeviceKind, assumed: Assumptions, dtype: str) -> Rates:
    """The rates of a device for a plan of `dtype`; `wide` is that of products whose weights stay in 16 bits."""
    weights = assumed.weight_dtype or dtype
    matrices, wide = (_products(device, assumed, name) for name in (weights, dtype))
    scores = assumed.attention_dtype or dtype
    whole = device.peak_fp8_flops or device.peak_bf16_flops
    peak = whole if scores in EIGHT_BITS else device.peak_bf16_flops
    reached = assumed.memory_efficiency or _measured(device.memory_efficiency) or TYPICAL_MEMORY
    kernel = device.kernel_overhead or TYPICAL_KERNEL
    return Rates(
        matrices=matrices,
        wide=wide,
        attention=peak * efficiency_of("attention_efficiency", device, assumed),
        experts=matrices * efficiency_of("expert_efficiency", device, assumed),
        memory=device.memory_bandwidth * reached,
        cache=device.memory_bandwidth * efficiency_of("cache_efficiency", device, assumed),
        weight_bytes=NUMBER_BYTES[weights],
        kv_bytes=NUMBER_BYTES[assumed.kv_dtype or dtype],
        row_bytes=NUMBER_BYTES[dtype],
        kernel=kernel if assumed.kernel_overhead is None else assumed.kernel_overhead,
        step=device.step_overhead if assumed.step_overhead is None else assumed.step_overhead,
    )


def efficiency_of(name: str, device: DeviceKind, assumed: Assumptions) -> float:
    """One of TYPICAL: as it is assumed, as the device was measured, or as is typical."""
    measured, typical = TYPICAL[name]
    return getattr(assumed, name) or device.efficiency.get(measured) or typical


def framework_of(device: DeviceKind, assumed: Assumptions) -> float:
    """Bytes of a device that the runtime keeps to itself; faked devices share the host's."""
    typical = 0.0 if device.kind == "cpu" else TYPICAL_FRAMEWORK
    return typical if assumed.framework_bytes is None else assumed.framework_bytes


def _products(device: DeviceKind, assumed: Assumptions, dtype: str) -> float:
    """FLOP/s of matrix products of a dtype; a device without 8-bit products multiplies in 16 bits."""
    if dtype in EIGHT_BITS and device.peak_fp8_flops:
        return device.peak_fp8_flops * efficiency_of("fp8_efficiency", device, assumed)
    measured = device.efficiency.get("float32" if dtype == "float32" else "bfloat16")
    return device.peak_bf16_flops * (assumed.matmul_efficiency or measured or TYPICAL_MATMUL)


def _measured(efficiency: float) -> float | None:
    return efficiency if efficiency != 1.0 else None
