"""Deployments by name: a TOML file in `meshes/` says how large the mesh is and what its devices can do."""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from jaxpar.assets import mesh_dir
from jaxpar.errors import MeshError, PlanError
from jaxpar.links import TOPOLOGIES, Links, Topology
from jaxpar.mesh import MeshSpec, parse_experts_over
from jaxpar.values import shown


@dataclass(frozen=True)
class DeviceKind:
    """What one device can do: the public figures of its maker, before any efficiency.

    Memory is in bytes; bandwidths are in bytes per second, links counted one way. `link_bandwidth` holds within a node,
    the `devices_per_node` devices joined by fast links (NVLink, a TPU slice), `internode_bandwidth` between nodes.
    Latencies are seconds of one step of a collective, likewise; no maker gives them. The defaults are those of GPUs:
    a sum over 8 H200 takes 22.6 us for 256 KiB and 33 us for 512 KiB, of which bandwidth asks 1 and 2; as two steps
    that is 10 to 15 us each. `topology` is "switch" (any two devices are one step apart) or "torus".
    """

    kind: str
    memory_bytes: int
    peak_bf16_flops: float
    memory_bandwidth: float
    link_bandwidth: float
    internode_bandwidth: float
    devices_per_node: int
    link_latency: float = 10e-6
    internode_latency: float = 15e-6
    topology: Topology = "switch"

    @property
    def links(self) -> Links:
        """What a plan takes over."""
        return Links(
            self.link_bandwidth, self.link_latency, self.internode_bandwidth, self.internode_latency, self.topology
        )


@dataclass(frozen=True)
class Preset:
    """A deployment: the mesh, the axes that experts are split over, and the device that each rank runs on."""

    name: str
    description: str
    mesh: MeshSpec
    experts_over: tuple[str, ...]
    device: DeviceKind

    @property
    def plan_fields(self) -> dict[str, Any]:
        """What a plan takes over unless it is asked for something else."""
        return {
            "experts_over": self.experts_over,
            "devices_per_node": self.device.devices_per_node,
            "links": self.device.links,
        }


def preset_names() -> tuple[str, ...]:
    """Names of the bundled presets."""
    return tuple(sorted(path.stem for path in mesh_dir().glob("*.toml")))


def load_preset(name_or_path: str | os.PathLike[str]) -> Preset:
    """Read a bundled preset by name, or a `.toml` file by path.

    Raises:
        MeshError: no such preset or file, or a key that is missing, unknown or has a value that cannot be.
    """
    text = os.fspath(name_or_path)
    if text in preset_names():
        path = mesh_dir() / f"{text}.toml"
    elif text.endswith(".toml"):
        path = Path(text)
    else:
        raise MeshError(f"no mesh preset {text!r}: use one of {', '.join(preset_names())}, or the path of a .toml file")
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MeshError(f"{path}: cannot be read ({error.strerror}): check the path") from error
    except (ValueError, RecursionError) as error:
        raise MeshError(f"{path}: not a TOML file ({error}): see the presets in {mesh_dir()}") from error
    try:
        return _preset(path.stem, document)
    except (MeshError, PlanError) as error:
        raise MeshError(f"{path}: {error}") from error


def resolve_mesh(
    mesh: str | os.PathLike[str] | Mapping[str, int] | MeshSpec | Preset,
) -> tuple[MeshSpec, Preset | None]:
    """Turn anything that names a mesh into its spec, with the preset where it came from one.

    Takes a spec string ("dp=2,tp=4"), a bundled preset's name ("h20-32"), the path of a `.toml` file, a mapping of axis
    sizes, a `MeshSpec`, or a `Preset`.

    Raises:
        MeshError: it is none of these, or `MeshSpec` or `load_preset` refuses it.
    """
    if isinstance(mesh, MeshSpec):
        return mesh, None
    if isinstance(mesh, Mapping):
        return MeshSpec.from_sizes(mesh), None
    if not isinstance(mesh, str | os.PathLike | Preset):
        raise MeshError(f'mesh={shown(mesh)}: give axis sizes such as "dp=2,tp=4", a preset or a .toml file')
    if isinstance(mesh, str) and not mesh.endswith(".toml") and mesh not in preset_names():
        if mesh.strip() and "=" not in mesh:
            raise MeshError(
                f'mesh {mesh!r} is neither axis sizes such as "dp=2,tp=4" nor a preset ({", ".join(preset_names())}) '
                "nor the path of a .toml file"
            )
        return MeshSpec.parse(mesh), None
    preset = mesh if isinstance(mesh, Preset) else load_preset(mesh)
    return preset.mesh, preset


def _preset(name: str, document: dict[str, Any]) -> Preset:
    _check_keys(document, "", required={"description", "mesh", "device"}, optional={"experts_over"})
    device = _table(document, "device")
    optional = {field.name: field.default for field in fields(DeviceKind) if field.default is not MISSING}
    _check_keys(device, "device.", {field.name for field in fields(DeviceKind)} - optional.keys(), optional.keys())
    device = optional | device
    return Preset(
        name=name,
        description=_string(document, "description"),
        mesh=MeshSpec.from_sizes(_table(document, "mesh")),
        experts_over=parse_experts_over(_strings(document, "experts_over", default=["ep"])),
        device=DeviceKind(
            kind=_string(device, "kind"),
            memory_bytes=_count(device, "memory_bytes"),
            peak_bf16_flops=_positive(device, "peak_bf16_flops"),
            memory_bandwidth=_positive(device, "memory_bandwidth"),
            link_bandwidth=_positive(device, "link_bandwidth"),
            internode_bandwidth=_positive(device, "internode_bandwidth"),
            devices_per_node=_count(device, "devices_per_node"),
            link_latency=_positive(device, "link_latency"),
            internode_latency=_positive(device, "internode_latency"),
            topology=_topology(device),
        ),
    )


def _check_keys(
    table: dict[str, Any], prefix: str, required: set[str], optional: AbstractSet[str] = frozenset()
) -> None:
    if missing := sorted(required - table.keys()):
        raise MeshError(f"{prefix}{missing[0]} is missing; give {', '.join(sorted(required))}")
    if unknown := sorted(table.keys() - required - optional):
        known = ", ".join(sorted(required | optional))
        raise MeshError(f"unknown key {prefix + unknown[0]!r}; the keys are {known}")


def _table(table: dict[str, Any], key: str) -> dict[str, Any]:
    value = table[key]
    return value if isinstance(value, dict) else _refuse(key, value, f"a table, [{key}]")


def _string(table: dict[str, Any], key: str) -> str:
    value = table[key]
    return value if isinstance(value, str) and value else _refuse(key, value, "a text")


def _strings(table: dict[str, Any], key: str, default: list[str]) -> list[str]:
    value = table.get(key, default)
    good = isinstance(value, list) and all(isinstance(item, str) for item in value)
    return value if good else _refuse(key, value, 'a list of axes such as ["dp", "tp"]')


def _positive(table: dict[str, Any], key: str) -> float:
    value = table[key]
    good = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max
    return float(value) if good else _refuse(key, value, "a number above 0, such as 450e9")


def _count(table: dict[str, Any], key: str) -> int:
    value = _positive(table, key)
    return int(value) if value == int(value) else _refuse(key, value, "a whole number from 1")


def _topology(table: dict[str, Any]) -> Topology:
    value = table["topology"]
    return value if value in TOPOLOGIES else _refuse("topology", value, " or ".join(map(repr, TOPOLOGIES)))


def _refuse(key: str, value: object, expected: str) -> NoReturn:
    raise MeshError(f"{key} is {value!r}: expected {expected}")
