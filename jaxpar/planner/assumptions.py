"""Everything that the planner assumes and cannot count: printed with every result, and each of it can be set."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from jaxpar.errors import PlanError
from jaxpar.values import real_number, shown

NUMBER_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, "int8": 1.0, "fp4": 0.5}
"""Types of weights, cache and activations, and the bytes of a number. Programs here run the first three."""

QUEUES = ("none", "md1")


def _says(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Assumptions:
    """Efficiencies are parts of what the device can do, 1: all of it; None: as its preset has it measured, else 1.

    Raises:
        PlanError: a value that cannot be.
    """

    weight_dtype: str = _says("bfloat16", "type of weights in memory and in products; programs here run bfloat16")
    kv_dtype: str = _says("bfloat16", "type of cached keys, values and latents")
    activation_dtype: str = _says("bfloat16", "type of the residual stream, and of what is sent")
    matmul_efficiency: float | None = _says(None, "part of the peak that 16-bit products reach; None: the device's")
    fp8_efficiency: float | None = _says(None, "part of the peak, twice that of bf16, that fp8 products reach")
    memory_efficiency: float | None = _says(None, "part of the memory's bandwidth that reading weights reaches")
    attention_efficiency: float | None = _says(None, "part of the peak that prefill attention reaches")
    cache_efficiency: float | None = _says(None, "part of the memory's bandwidth that decode attention reaches")
    expert_efficiency: float | None = _says(None, "part of what dense products reach that those of experts do")
    expert_tile: int = _says(0, "rows that an expert's product is filled up to, where it has any (0: none)")
    imbalance: float = _says(1.0, "rows of the fullest rank of experts over the mean (jaxpar ... --moe-stats measures)")
    kernel_overhead: float | None = _says(None, "seconds that each kernel takes besides its work")
    step_overhead: float = _says(0.0, "seconds of the host in each step that no device works")
    overlap: float = _says(1.0, "part of what may overlap that does: 1 all, 0 nothing")
    reserve: float = _says(0.1, "part of a device's memory that is left free")
    framework_bytes: float = _says(2e9, "bytes of the runtime, its communication buffers and its programs")
    queue: str = _says("none", "waiting before prefill: none, or md1 (random arrivals, one prefill after another)")
    transfer_bandwidth: float | None = _says(None, "bytes per second of a device from prefill to decode pool")
    causal_skip: bool = _says(True, "whether attention leaves out what the mask hides, and the empty part of tables")

    def __post_init__(self) -> None:
        """Refuse values that cannot be."""
        for name in ("weight_dtype", "kv_dtype", "activation_dtype"):
            if getattr(self, name) not in NUMBER_BYTES:
                raise PlanError(f"{name}={shown(getattr(self, name))}: use one of {', '.join(NUMBER_BYTES)}")
        if self.queue not in QUEUES:
            raise PlanError(f"queue={shown(self.queue)}: use {' or '.join(QUEUES)}")
        for name, (low, high) in _BOUNDS.items():
            given = getattr(self, name)
            value = real_number(given)
            if given is not None and (value is None or not low <= value <= high):
                raise PlanError(f"{name}={shown(given)}: it must be from {low:g} to {high:g}")

    @classmethod
    def names(cls) -> dict[str, str]:
        """Every assumption and what it is, in one line."""
        return {one.name: one.metadata["help"] for one in fields(cls)}

    def set(self, settings: Iterable[str]) -> Assumptions:
        """The same with each "name=value" of `settings` taken over.

        Raises:
            PlanError: no such assumption, or a value that it cannot have.
        """
        known = {one.name: one for one in fields(self)}
        values: dict[str, Any] = {}
        for setting in settings:
            name, equals, text = (part.strip() for part in setting.partition("="))
            if not equals or name not in known:
                raise PlanError(f"assume {shown(setting)}: write name=value, of {', '.join(known)}")
            values[name] = _read(name, text, str(known[name].type))
        return replace(self, **values)


_EFFICIENCY = (1e-3, 1.0)
_BOUNDS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(
        (
            "matmul_efficiency",
            "fp8_efficiency",
            "memory_efficiency",
            "attention_efficiency",
            "cache_efficiency",
            "expert_efficiency",
        ),
        _EFFICIENCY,
    ),
    "expert_tile": (0, 4096),
    "imbalance": (1.0, 65536.0),
    "kernel_overhead": (0.0, 1.0),
    "step_overhead": (0.0, 10.0),
    "overlap": (0.0, 1.0),
    "reserve": (0.0, 0.9),
    "framework_bytes": (0.0, 1e12),
    "transfer_bandwidth": (1.0, 1e15),
}


def _read(name: str, text: str, kind: str) -> Any:
    if text in ("None", "none", "") and "None" in kind:
        return None
    if kind.startswith("str"):
        return text
    if kind.startswith("bool"):
        if text.lower() not in ("true", "false"):
            raise PlanError(f"{name}={shown(text)}: it must be true or false")
        return text.lower() == "true"
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or (kind.startswith("int") and value != int(value)):
        raise PlanError(f"{name}={shown(text)}: it must be a {'whole number' if kind.startswith('int') else 'number'}")
    return int(value) if kind.startswith("int") else value
