"""Devices for a mesh: faked on a CPU as many as it needs, ordered by the machine's topology on accelerators."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections import Counter
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxpar.errors import MeshError
from jaxpar.mesh import AXES, MeshSpec
from jaxpar.values import shown

MAX_FAKED_DEVICES = 512
"""Past this an all-reduce over faked devices takes longer than anything that it could teach."""

FAKED = 8
"""CPU devices where nothing says how many."""

_AXIS_TYPES = (AxisType.Auto,) * len(AXES)


def ensure_devices(spec: MeshSpec, platform: str | None = None) -> list[jax.Device]:
    """Return the `spec.size` devices that a mesh runs on, the first ones of the machine; starts JAX's backend.

    On a CPU the devices are faked; JAX fixes their number when its backend starts, so the first call decides. A number
    that was set before and is larger stays.

    Args:
        spec: the mesh.
        platform: "cpu", "gpu" or "tpu"; None takes JAX's default, which is an accelerator where there is one.

    Raises:
        MeshError: no such platform, more devices than the machine has or than can be faked, or a backend that has
            already started with fewer CPU devices.
    """
    if not isinstance(platform, str | None):
        raise MeshError(f'platform={shown(platform)}: use "cpu", "gpu", "tpu", or None for JAX\'s default')
    if platform in (None, "cpu"):
        _fake_cpu_devices(spec.size)
    try:
        devices = jax.devices(platform)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise MeshError(f'JAX has no {platform or "default"} devices ({reason}): use platform="cpu"') from error
    if len(devices) >= spec.size:
        return devices[: spec.size]
    need = f"mesh {spec} needs {spec.size} devices"
    if devices[0].platform != "cpu":
        raise MeshError(
            f"{need} and this machine has {len(devices)} ({devices[0].device_kind}): "
            'use a smaller mesh, or platform="cpu" to fake the devices'
        )
    if spec.size > MAX_FAKED_DEVICES:
        raise MeshError(f"{need}: at most {MAX_FAKED_DEVICES} can be faked on a CPU; use a smaller mesh")
    raise MeshError(
        f"{need} and JAX has already started with {len(devices)}: call jaxpar.load with the largest mesh before any "
        f'other JAX work, or put jax.config.update("jax_num_cpu_devices", {spec.size}) at the top of the program'
    )


def devices_at_hand(platform: str | None, count: int | None) -> list[jax.Device]:
    """`count` devices of the platform (None: JAX's default), or all; of a CPU as many are faked, or FAKED.

    Raises:
        MeshError: there are none of the platform, or fewer than `count`; or `count` is below 1.
    """
    if count is not None and count < 1:
        raise MeshError(f"devices={count}: give 1 or more")
    # A CPU's devices are faked before anything else starts JAX.
    ensure_devices(MeshSpec(dp=count or FAKED), "cpu")
    found = ensure_devices(MeshSpec(), platform)
    if found[0].platform == "cpu":
        return ensure_devices(MeshSpec(dp=count or FAKED), "cpu")
    return ensure_devices(MeshSpec(dp=count or len(jax.devices(found[0].platform))), found[0].platform)


def make_mesh(spec: MeshSpec, devices: Sequence[jax.Device]) -> Mesh:
    """Lay `devices`, as many as the mesh has ranks, out as a mesh with all five axes, tp innermost.

    CPU devices stay in order. Accelerators are ordered by JAX's topology-aware helper; where they span several slices
    (GPU: NVLink domains), the outermost axes cross the slow network and the inner ones stay within a slice.

    Raises:
        MeshError: the number of devices is not the mesh's.
    """
    if len(devices) != spec.size:
        raise MeshError(f"mesh {spec} needs {spec.size} devices, got {len(devices)}: pass what ensure_devices returned")
    return Mesh(_arrange(spec, devices), AXES, axis_types=_AXIS_TYPES)


def abstract_mesh(spec: MeshSpec) -> AbstractMesh:
    """The mesh of `make_mesh` without devices, for tracing."""
    return AbstractMesh(tuple(spec.sizes.values()), AXES, axis_types=_AXIS_TYPES)


def _fake_cpu_devices(count: int) -> None:
    """Have JAX's CPU backend start with at least `count` devices; without effect if it has started."""
    if _cpu_devices_asked_for() < count <= MAX_FAKED_DEVICES:
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", count)


def _cpu_devices_asked_for() -> int:
    """Number of CPU devices that JAX's option asks for, or the XLA flag that the option would override."""
    asked = int(jax.config.values["jax_num_cpu_devices"])
    if asked >= 0:
        return asked
    flags = re.findall(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return int(flags[-1]) if flags else 1


def _arrange(spec: MeshSpec, devices: Sequence[jax.Device]) -> np.ndarray:
    """Array of devices of the mesh's shape, every group along an inner axis as close together as can be."""
    shape = tuple(spec.sizes.values())
    in_order = np.asarray(devices, dtype=object).reshape(shape)
    if devices[0].platform == "cpu":
        return in_order
    per_slice = Counter(_slice_of(device) for device in devices)
    if len(set(per_slice.values())) > 1:
        return in_order  # slices of unequal shares have no common inner mesh
    outer = _split_outermost(spec, len(per_slice))
    inner = [size // count for size, count in zip(shape, outer, strict=True)]
    try:
        if len(per_slice) == 1:
            return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        return mesh_utils.create_hybrid_device_mesh(inner, outer, devices, allow_split_physical_axes=True)
    except AssertionError:
        return in_order  # some chips of a torus, with holes between them: no order is better than another


def _slice_of(device: jax.Device) -> int:
    """Slice (GPU: NVLink domain) of a device, which may span processes; JAX leaves it out where there is only one."""
    return int(getattr(device, "slice_index", 0))


def _split_outermost(spec: MeshSpec, slices: int) -> list[int]:
    """How many slices each axis spans: the outermost axes take as many as divide them.

    Every slice holds spec.size / slices devices, so `slices` divides spec.size and its factors all find an axis.
    """
    outer = []
    for size in spec.sizes.values():
        outer.append(math.gcd(size, slices))
        slices //= outer[-1]
    return outer
