"""Everything that the planner assumes and cannot count: printed with every result, and each of it can be set."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from jaxpar.errors import PlanError
from jaxpar.values import real_number, shown

NUMBER_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, "int8": 1.0, "fp4": 0.5}
"""Types of weights and cache, and the bytes of a number. Programs here run the first three."""
EIGHT_BITS = ("fp8", "int8", "fp4")
"""Those whose products run at the rate of 8-bit ones."""

QUEUES = ("none", "md1")


def _says(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Assumptions:
    """Efficiencies are parts of what the device can do, from 0 to 1. None: as its preset has it, or what is typical.

    Raises:
        PlanError: a value that cannot be.
    """

    weight_dtype: str | None = _says(None, "type of the matrices of attention, FFNs and experts (the plan's dtype)")
    kv_dtype: str | None = _says(None, "type of cached keys, values and latents (the plan's dtype)")
    attention_dtype: str | None = _says(None, "type in which attention multiplies (the plan's dtype)")
    matmul_efficiency: float | None = _says(None, "part of the peak that 16-bit products reach (the device's, or 0.75)")
    fp8_efficiency: float | None = _says(
        None, "part of the 8-bit peak that 8-bit products reach (the device's, or 0.5)"
    )
    memory_efficiency: float | None = _says(
        None, "part of the memory's bandwidth that is reached (the device's, or 0.8)"
    )
    attention_efficiency: float | None = _says(
        None, "part of the peak that prefill attention reaches (the device's, or 0.3)"
    )
    cache_efficiency: float | None = _says(
        None, "part of the memory's bandwidth at which decode attention reads the cache (the device's, or 0.85)"
    )
    skip_masked: bool = _says(True, "whether attention leaves out keys that no query of a tile sees")
    expert_efficiency: float | None = _says(
        None, "what products of experts reach of what dense ones do (the device's, or 0.45)"
    )
    expert_tile: int = _says(64, "rows up to which each expert's products are filled")
    fused: bool = _says(
        False, "whether rows are rounded to 8 bits, and go to experts and back, in no pass of their own"
    )
    imbalance: float = _says(1.0, "rows of the fullest rank of experts over the mean (`--moe-stats` measures them)")
    kernel_overhead: float | None = _says(None, "seconds of each kernel besides its work (the device's, or 3 us)")
    step_overhead: float | None = _says(None, "seconds of each step in which no device works (the device's, or 0)")
    overlap: float = _says(0.8, "part of what the plan lets overlap that does")
    reserve: float = _says(0.1, "part of a device's memory that is left free")
    framework_bytes: float | None = _says(
        None, "bytes of the runtime, its programs and its communication buffers (2 GB, of a CPU 0)"
    )
    queue: str = _says("md1", "waiting before a prefill: none, or md1 (random arrivals, one prefill after another)")
    transfer_bandwidth: float | None = _says(None, "bytes/s a device sends to a decode pool (the links between nodes)")

    def __post_init__(self) -> None:
        """Refuse values that cannot be."""
        for name in ("weight_dtype", "kv_dtype", "attention_dtype"):
            if getattr(self, name) not in (None, *NUMBER_BYTES):
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


def ideal(**changes: Any) -> Assumptions:
    """Every efficiency 1, nothing lost and all that may overlap hidden: what bounds any program from below."""
    whole = {name: 1.0 for name in _BOUNDS if name.endswith("_efficiency")}
    none = {"kernel_overhead": 0.0, "step_overhead": 0.0, "expert_tile": 1, "fused": True, "overlap": 1.0}
    return Assumptions(**(whole | none | changes))


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
    "expert_tile": (1, 4096),
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
