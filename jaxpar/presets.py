"""Deployments by name: a TOML file in `meshes/` says how large the mesh is and what its devices can do."""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from jaxpar.assets import mesh_dir
from jaxpar.errors import MeshError, PlanError
from jaxpar.ledger.traffic import SENT_BYTES
from jaxpar.links import LEVELS, TOPOLOGIES, Fit, Links, Topology
from jaxpar.mesh import MeshSpec, parse_experts_over
from jaxpar.values import shown

PRODUCTS = ("bfloat16", "float32", "fp8")
EFFICIENCIES = (*PRODUCTS, "attention", "cache", "experts")
"""What parts of the peaks are given for: matrix products by dtype, and parts of a model."""

Name = TypeVar("Name", bound=str)


@dataclass(frozen=True)
class DeviceKind:
    """What one device can do: the public figures of its maker, before any efficiency.

    Memory is in bytes; bandwidths are in bytes per second, links counted one way. `link_bandwidth` holds within a node,
    the `devices_per_node` devices joined by fast links (NVLink, a TPU slice), `internode_bandwidth` between nodes.
    Latencies are seconds of one step of a collective, likewise; no maker gives them. The defaults are those of GPUs:
    a sum over 8 H200 takes 22.6 us for 256 KiB and 33 us for 512 KiB, of which bandwidth asks 1 and 2; as two steps
    that is 10 to 15 us each. `topology` is "switch" (any two devices are one step apart) or "torus".

    The rest is what efficiency leaves of these figures; `jaxpar calibrate` measures it. `efficiency` has parts of the
    peak, 1 or what is typical where one is not given: what matrix products of a dtype reach, and prefill attention; of
    the memory's bandwidth what decode attention reads the cache at; of what dense products reach what those of experts
    do. `memory_efficiency` is the part of the bandwidth at which weights are read. `step_overhead` is what launching a
    step program takes, `kernel_overhead` what each kernel in it takes besides its work, in seconds. `fits` are
    collectives as they were measured (`links.Fit`).
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
    peak_fp8_flops: float = 0.0
    efficiency: Mapping[str, float] = field(default_factory=dict, hash=False)
    memory_efficiency: float = 1.0
    step_overhead: float = 0.0
    kernel_overhead: float = 0.0
    fits: tuple[Fit, ...] = field(default=(), hash=False)

    def flops(self, dtype: str) -> float:
        """FLOP/s that matrix products of a dtype ("bfloat16", "float32", "fp8") reach.

        8-bit floats have the peak of bfloat16 unless one of their own is given; every other dtype has that of bfloat16.
        """
        peak = self.peak_fp8_flops if dtype == "fp8" and self.peak_fp8_flops else self.peak_bf16_flops
        return peak * self.efficiency.get(dtype, 1.0)

    @property
    def memory_rate(self) -> float:
        """Bytes per second that reading memory reaches."""
        return self.memory_bandwidth * self.memory_efficiency

    @cached_property
    def links(self) -> Links:
        """What a plan takes over."""
        return Links(
            self.link_bandwidth,
            self.link_latency,
            self.internode_bandwidth,
            self.internode_latency,
            self.topology,
            self.fits,
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
    known = {one.name for one in fields(DeviceKind)}
    required = {one.name for one in fields(DeviceKind) if one.default is MISSING and one.default_factory is MISSING}
    _check_keys(device, "device.", required, known - required)
    return Preset(
        name=name,
        description=_string(document, "description"),
        mesh=MeshSpec.from_sizes(_table(document, "mesh")),
        experts_over=parse_experts_over(_strings(document, "experts_over", default=["ep"])),
        device=_device(device),
    )


def _device(device: dict[str, Any]) -> DeviceKind:
    """The kind, checked; what is left out has the default of `DeviceKind`."""
    read: dict[str, Callable[[dict[str, Any], str], Any]] = {
        **{one.name: _positive for one in fields(DeviceKind)},
        "kind": _string,
        "memory_bytes": _count,
        "devices_per_node": _count,
        "topology": _topology,
        "efficiency": _efficiency,
        "memory_efficiency": _fraction,
        "step_overhead": _not_negative,
        "kernel_overhead": _not_negative,
        "fits": _fits,
    }
    return DeviceKind(**{key: read[key](device, key) for key in device})


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


def _not_negative(table: dict[str, Any], key: str) -> float:
    return 0.0 if table[key] == 0 and not isinstance(table[key], bool) else _positive(table, key)


def _fraction(table: dict[str, Any], key: str) -> float:
    value = table[key]
    good = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1
    return float(value) if good else _refuse(key, value, "a part of the peak, above 0 and at most 1")


def _efficiency(table: dict[str, Any], key: str) -> dict[str, float]:
    value = table[key]
    good = isinstance(value, dict) and value.keys() <= set(EFFICIENCIES)
    found = value if good else _refuse(key, value, f"a table of parts of the peak, of {', '.join(EFFICIENCIES)}")
    return {dtype: _fraction(found, dtype) for dtype in found}


def _fits(table: dict[str, Any], key: str) -> tuple[Fit, ...]:
    value = table[key]
    good = isinstance(value, list) and all(isinstance(one, dict) for one in value)
    return tuple(map(_fit, value if good else _refuse(key, value, "tables, [[device.fits]]")))


def _fit(table: dict[str, Any]) -> Fit:
    _check_keys(table, "device.fits.", {"collective", "ranks", "lines"}, {"level", "error"})
    table = {"level": LEVELS[0], "error": 0} | table
    if (ranks := _count(table, "ranks")) < 2:
        _refuse("ranks", ranks, "a whole number from 2")
    return Fit(
        collective=_one_of(table, "collective", tuple(SENT_BYTES)),
        ranks=ranks,
        level=_one_of(table, "level", LEVELS),
        lines=_lines(table, "lines"),
        error=_not_negative(table, "error"),
    )


def _lines(table: dict[str, Any], key: str) -> tuple[tuple[float, float], ...]:
    value = table[key]
    good = isinstance(value, list) and value and all(isinstance(line, list) and len(line) == 2 for line in value)
    lines = value if good else _refuse(key, value, "pairs of seconds and seconds a byte, such as [[1e-5, 2e-12]]")
    return tuple((_not_negative({"alpha": a}, "alpha"), _not_negative({"beta": b}, "beta")) for a, b in lines)


def _count(table: dict[str, Any], key: str) -> int:
    value = _positive(table, key)
    return int(value) if value == int(value) else _refuse(key, value, "a whole number from 1")


def _topology(table: dict[str, Any], key: str) -> Topology:
    return _one_of(table, key, TOPOLOGIES)


def _one_of(table: dict[str, Any], key: str, values: tuple[Name, ...]) -> Name:
    value = table[key]
    return value if value in values else _refuse(key, value, " or ".join(map(repr, values)))


def _refuse(key: str, value: object, expected: str) -> NoReturn:
    raise MeshError(f"{key} is {value!r}: expected {expected}")
