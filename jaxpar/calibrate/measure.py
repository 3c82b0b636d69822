"""Measures the machine at hand, one thing after another."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxpar.calibrate.clock import ENOUGH, median_seconds
from jaxpar.calibrate.overheads import LAYERS, narrow, overheads
from jaxpar.calibrate.programs import COLLECTIVES, Loop, collective, nothing, product, triad
from jaxpar.calibrate.result import Calibration, Rate, Sample
from jaxpar.calibrate.steps import run_steps
from jaxpar.calibrate.sublayers import efficiency_of, trials
from jaxpar.devices import ensure_devices, make_mesh
from jaxpar.links import Level
from jaxpar.mesh import MeshSpec
from jaxpar.presets import DeviceKind, Preset
from jaxpar.tables import counted, human_bytes

SIZES = tuple(2**power for power in range(10, 27, 2))
"""Bytes of a rank's operand, 1 KiB to 64 MiB; on a CPU to 1 MiB, past which its caches end and no line goes on."""

_LONG = 0.02
"""Seconds of a product after which no larger one is tried."""

_PRODUCTS = {"bfloat16": jnp.bfloat16, "float32": jnp.float32, "fp8": jnp.float8_e4m3fn}

_WHERE: dict[Level, str] = {"inside": "of a node", "across": "of as many nodes"}

Say = Callable[[str], None]


def calibrate(
    spec: MeshSpec,
    preset: Preset | None = None,
    platform: str | None = None,
    sizes: Sequence[int] | None = None,
    collectives: Sequence[str] = tuple(COLLECTIVES),
    enough: float = ENOUGH,
    steps: bool = True,
    say: Say = lambda text: None,
) -> Calibration:
    """Products, memory and every collective on the devices of a mesh.

    Groups are of every power of two that divides the devices: consecutive ones while they are of one node, and of the
    same place on different nodes. What a maker says of the device comes from `preset`, or is measured.

    Args:
        spec: as many devices as this.
        preset: whose mesh it is, if any.
        platform: as `ensure_devices` takes it.
        sizes: bytes of messages, filled up to whole numbers for each rank; None: `SIZES`.
        collectives: which.
        enough: seconds after which a program has run often enough.
        steps: whether to run models, for overheads and for what parts of them reach.
        say: told what is being measured.

    Raises:
        MeshError: the machine has fewer devices.
    """
    devices = ensure_devices(spec, platform)
    per_node = min(preset.device.devices_per_node, spec.size) if preset else spec.size
    if sizes is None:
        sizes = [size for size in SIZES if size <= 2**20 or devices[0].platform != "cpu"]
    alone = _timer(0.0, enough)
    say("what launching a program takes")
    launch = alone(nothing(make_mesh(spec, devices)))
    timer = _timer(launch, enough)
    rates = [*_rates(make_mesh(spec, devices), timer, say)]
    samples = []
    for level, ranks, grouped in groups_of(spec.size, per_node):
        mesh = make_mesh(grouped, devices)
        axes = ("tp",) if level == "inside" else ("dp",)
        for name in collectives:
            taken = {}
            for size in (-(-size // (4 * ranks)) * 4 * ranks for size in sizes):
                say(f"{name} of {human_bytes(size)} over {ranks} ranks {_WHERE[level]}")
                taken[size] = timer(collective(name, mesh, axes, size, calls=8 if size <= 2**16 else 2))
            samples.append(Sample.of(name, ranks, level, [*taken], [*taken.values()]))
    base = preset.device if preset else _kind(devices, samples)
    experts = preset.experts_over if preset else ("ep",)
    found = Calibration(spec, experts, base, tuple(rates), tuple(samples))
    return _with_steps(found, devices, say) if steps else found


def _with_steps(found: Calibration, devices: Sequence[jax.Device], say: Say) -> Calibration:
    """With overheads and with what parts of a model reach, each from real steps of which the rest is predicted."""
    replicas = MeshSpec(dp=len(devices))
    mesh = make_mesh(replicas, devices)
    runs = []
    for layers in LAYERS:
        say(f"decode steps of a narrow model of {counted(layers, 'layer')}")
        runs.append(run_steps(mesh, replicas, narrow(layers), "decode", 1, 64))
    found = replace(found, overheads=overheads(found.device, runs))
    for trial in trials(devices[0].platform == "cpu"):
        say(f"{trial.phase} steps of a layer of {trial.card}")
        spec = MeshSpec.from_sizes({trial.axis: len(devices)})
        run = run_steps(make_mesh(spec, devices), spec, trial.config, trial.phase, trial.requests, trial.tokens)
        found = replace(found, reached={**found.reached, trial.efficiency: efficiency_of(trial, run, found.device)})
    return found


def _timer(launch: float, enough: float) -> Callable[[Loop], float]:
    """Seconds of one call of a loop's operation, without what launching it takes."""

    def seconds(loop: Loop) -> float:
        taken = median_seconds(loop.program, *loop.arguments, enough=enough)
        return max(taken - launch, taken / 100) / loop.calls

    return seconds


def _rates(mesh: Mesh, seconds: Callable[[Loop], float], say: Say) -> Iterator[Rate]:
    platform = mesh.devices.flat[0].platform
    for what, dtype in _PRODUCTS.items():
        if what == "fp8" and not _runs(mesh, dtype):
            continue
        for width in (256, 512, 1024, 2048, 4096, 8192):
            say(f"products of {width} x {width} in {what}")
            taken = seconds(product(mesh, width, width, dtype, calls=2))
            yield Rate(what, width, taken, 2 * width**3 / taken)
            if taken > _LONG:
                break
    say("memory")
    size = 2**23 if platform == "cpu" else 2**28
    taken = seconds(triad(mesh, size, calls=2))
    yield Rate("triad", size, taken, 3 * size / taken)
    width = int((size // 4) ** 0.5)
    taken = seconds(product(mesh, 1, width, jnp.float32, calls=4))
    yield Rate("weights", 4 * width**2, taken, 4 * width**2 / taken)


def _runs(mesh: Mesh, dtype: Any) -> bool:
    """Whether the machine has products of a dtype of its own; a CPU would emulate 8-bit floats."""
    if mesh.devices.flat[0].platform == "cpu":
        return False
    try:
        product(mesh, 256, 256, dtype, calls=1)
    except Exception:  # a compiler refuses in its own words
        return False
    return True


def groups_of(devices: int, per_node: int) -> Iterator[tuple[Level, int, MeshSpec]]:
    """Every level, size of groups on it, and the mesh that has them: tp consecutive, dp far apart."""
    for ranks in _powers(devices):
        if per_node % ranks == 0:
            yield "inside", ranks, MeshSpec(dp=devices // ranks, tp=ranks)
    for ranks in _powers(devices // per_node):
        yield "across", ranks, MeshSpec(dp=ranks, tp=devices // ranks)


def _powers(count: int) -> Iterator[int]:
    """Powers of two from 2 that divide it, and itself."""
    return (
        ranks for ranks in range(2, count + 1) if count % ranks == 0 and (ranks & (ranks - 1) == 0 or ranks == count)
    )


def _kind(devices: Sequence[jax.Device], samples: Sequence[Sample]) -> DeviceKind:
    """A device of which nothing is known but what was measured; peaks follow from rates."""
    links = [sample for sample in samples if sample.level == "inside"]
    last = links[-1] if links else None
    bandwidth = last.sizes[-1] / last.seconds[-1] if last else 1e9
    latency = last.seconds[0] if last else 1e-6
    return DeviceKind(
        kind=devices[0].device_kind,
        memory_bytes=_memory(devices),
        peak_bf16_flops=1.0,
        memory_bandwidth=1.0,
        link_bandwidth=float(f"{bandwidth:.4g}"),
        internode_bandwidth=float(f"{bandwidth:.4g}"),
        devices_per_node=len(devices),
        link_latency=float(f"{latency:.4g}"),
        internode_latency=float(f"{latency:.4g}"),
    )


def _memory(devices: Sequence[jax.Device]) -> int:
    """Bytes of a device: what its allocator may have, or a share of the host's where devices are faked."""
    stats = devices[0].memory_stats() if devices[0].platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(devices)
