"""The devices that a plan may use: their kind, how many there are, and which of them fast links join.

h200-8x4        four nodes of eight H200            v5p-4x4x4       a slice of 64 TPU v5p, a torus of 4 x 4 x 4
h20-32          a preset: its devices               mine.toml:64    64 devices of the kind that a TOML describes
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, replace

from jaxpar.errors import MeshError
from jaxpar.kinds import DEVICES_A_CHIP, KINDS, SIDES
from jaxpar.links import Links
from jaxpar.mesh import MAX_RANKS
from jaxpar.presets import DeviceKind, load_preset, preset_names
from jaxpar.tables import counted
from jaxpar.values import shown

_EXAMPLE = 'write a cluster as "h200-8x4" (devices a node x nodes), "v5p-4x4x4", or a preset with a count, "h20-32:64"'


@dataclass(frozen=True)
class Cluster:
    """`devices` of one kind; `device.devices_per_node` of them are joined by fast links.

    `shape` is as it was written: devices a node and nodes, or the sides of a torus. `target` is what `jaxpar compile`
    calls the same devices, None where it has no compiler for them.
    """

    name: str
    device: DeviceKind
    devices: int
    shape: tuple[int, ...]
    target: str | None = None

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """Read a cluster.

        Raises:
            MeshError: it is none, or has devices that cannot be joined so.
        """
        if not isinstance(text, str) or not text.strip():
            raise MeshError(f"cluster {shown(text)}: {_EXAMPLE}")
        name, colon, count = text.strip().rpartition(":")
        if not colon:
            name, count = text.strip(), ""
        kind, dash, sizes = text.strip().partition("-")
        is_preset = name in preset_names() or name.endswith(".toml")
        # A node of a kind may have the name of a preset, which then has nothing to add.
        if is_preset and not (kind in KINDS and sizes.isdecimal() and _is_a_node(KINDS[kind], int(sizes))):
            return _of_preset(name, count)
        if not dash or kind not in KINDS or not re.fullmatch(r"[1-9][0-9]{0,6}(x[1-9][0-9]{0,6})*", sizes):
            known = f"the kinds are {', '.join(KINDS)}, the presets {', '.join(preset_names())}"
            raise MeshError(f"cluster {shown(text)}: {_EXAMPLE}; {known}")
        return _of_kind(text.strip(), kind, tuple(map(int, sizes.split("x"))))

    @property
    def devices_per_node(self) -> int:
        """Devices that fast links join."""
        return self.device.devices_per_node

    @property
    def nodes(self) -> int:
        """Nodes, or slices."""
        return -(-self.devices // self.devices_per_node)

    @property
    def links(self) -> Links:
        """What a plan takes over."""
        return self.device.links


def _is_a_node(kind: DeviceKind, devices: int) -> bool:
    return kind.topology == "switch" and devices <= kind.devices_per_node


def _of_kind(text: str, name: str, sizes: tuple[int, ...]) -> Cluster:
    kind = _known(name)
    devices = math.prod(sizes) * DEVICES_A_CHIP.get(name, 1)
    _refuse_many(text, devices)
    if kind.topology == "torus":
        if devices > kind.devices_per_node:
            raise MeshError(
                f"cluster {text!r} is {devices} devices and a slice of {kind.kind} has {kind.devices_per_node} at "
                "most: use a preset to join slices"
            )
        if len(sizes) != SIDES[name]:
            example = "x".join(["4"] * SIDES[name])
            raise MeshError(
                f"cluster {text!r}: a slice of {kind.kind} is a torus of {SIDES[name]} sides, such as {name}-{example}"
            )
        device = replace(kind, devices_per_node=devices)
        return Cluster(text, device, devices, sizes, f"{name}:{'x'.join(map(str, sizes))}")
    if len(sizes) > 2:
        raise MeshError(f"cluster {text!r}: GPUs are devices a node x nodes, such as {name}-8x4")
    per_node, nodes = sizes[0], sizes[1] if len(sizes) == 2 else 1
    if per_node > kind.devices_per_node:
        raise MeshError(
            f"cluster {text!r} has {per_node} devices a node, and fast links join {kind.devices_per_node} "
            f"{kind.kind} at most: write {name}-{kind.devices_per_node}x{-(-per_node * nodes // kind.devices_per_node)}"
        )
    device = replace(kind, devices_per_node=per_node)
    return Cluster(text, device, devices, (per_node, nodes), f"{name}:1x{nodes}x{per_node}")


def _of_preset(name: str, count: str) -> Cluster:
    preset = load_preset(name)
    if count and not re.fullmatch(r"[1-9][0-9]{0,8}", count):
        raise MeshError(f"cluster {shown(f'{name}:{count}')}: the count is a whole number of devices from 1")
    devices = int(count) if count else preset.mesh.size
    _refuse_many(name, devices)
    per_node = preset.device.devices_per_node
    if devices > per_node and devices % per_node:
        raise MeshError(
            f"cluster {shown(f'{name}:{count}')}: {counted(devices, 'device')} are no whole number of nodes of "
            f"{per_node}: use {devices - devices % per_node} or {devices + -devices % per_node}"
        )
    device = replace(preset.device, devices_per_node=min(per_node, devices))
    text = f"{os.fspath(name)}:{count}" if count else os.fspath(name)
    return Cluster(text, device, devices, (device.devices_per_node, -(-devices // device.devices_per_node)))


def _known(name: str) -> DeviceKind:
    """A kind with the figures of the bundled preset that has it calibrated, where there is one."""
    calibrated = [preset for preset in preset_names() if preset.startswith(f"{name}-calibrated-")]
    kind = KINDS[name]
    if not calibrated:
        return kind
    return replace(load_preset(calibrated[0]).device, devices_per_node=kind.devices_per_node)


def _refuse_many(text: str, devices: int) -> None:
    if devices > MAX_RANKS:
        raise MeshError(f"cluster {shown(text)} has {devices} devices, more than {MAX_RANKS}: use fewer")
