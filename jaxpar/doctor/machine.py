"""The devices that JAX sees, grouped by kind, with what is known of their memory and links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxpar.aot.kinds import GPUS, TPUS
from jaxpar.presets import DeviceKind, load_preset, preset_names

_MARKETED = {"TPU v5 lite": "TPU v5e", "TPU v5": "TPU v5p", "TPU v6 lite": "TPU v6e"}
"""What JAX calls some kinds -> the names that presets have for them."""


@dataclass(frozen=True)
class DeviceGroup:
    """Devices of one kind.

    `memory_bytes` is what the device says a program may use of it, or what the preset says it has; None: neither says.
    `grid` is the extent of a TPU's chips in each direction. `preset` is the first bundled one with devices of this
    kind, and `figures` are what it says of them; of kinds that no preset has, those of compile targets are known.
    """

    platform: str
    kind: str
    count: int
    processes: int
    slices: int
    grid: tuple[int, ...] | None
    memory_bytes: int | None
    memory_in_use: int | None
    preset: str | None
    figures: DeviceKind | None

    @property
    def nodes(self) -> int | None:
        """Groups of devices with fast links among them, slices of TPUs; None where the kind is not known."""
        if self.figures is None:
            return None
        if self.figures.topology == "torus":
            return self.slices
        return max(self.slices, -(-self.count // self.figures.devices_per_node))


def device_groups(devices: Sequence[Any]) -> list[DeviceGroup]:
    """Group `jax.Device`s, or whatever has their attributes, by platform and kind, in their order."""
    kinds: dict[tuple[str, str], list[Any]] = {}
    for device in devices:
        kinds.setdefault((device.platform, device.device_kind), []).append(device)
    return [_group(*kind, some) for kind, some in kinds.items()]


def _group(platform: str, kind: str, devices: Sequence[Any]) -> DeviceGroup:
    preset, figures = preset_of(kind)
    stats = devices[0].memory_stats() or {}
    coords = [device.coords for device in devices if getattr(device, "coords", None) is not None]
    known = None if figures is None else figures.memory_bytes
    return DeviceGroup(
        platform=platform,
        kind=kind,
        count=len(devices),
        processes=len({device.process_index for device in devices}),
        slices=len({getattr(device, "slice_index", 0) for device in devices}),
        grid=tuple(1 + max(axis) - min(axis) for axis in zip(*coords, strict=True)) or None,
        memory_bytes=stats.get("bytes_limit", known),
        memory_in_use=stats.get("bytes_in_use"),
        preset=preset,
        figures=figures,
    )


def preset_of(kind: str) -> tuple[str | None, DeviceKind | None]:
    """The first bundled preset whose devices are of the kind that JAX names so, and the kind's figures.

    A kind that no preset has may be one that programs can be compiled for: then there are figures alone, or neither.
    What follows the name of the model ("NVIDIA H100 80GB HBM3") does not matter.
    """
    words = _MARKETED.get(kind, kind).lower().split()
    presets: list[tuple[str | None, DeviceKind]] = [(name, load_preset(name).device) for name in preset_names()]
    of_targets = *(one.device for one in TPUS.values()), *(one.device for one in GPUS.values())
    for name, figures in [*presets, *((None, one) for one in of_targets)]:
        known = figures.kind.lower().split()
        if words[: len(known)] == known:
            return name, figures
    return None, None
