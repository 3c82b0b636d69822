"""The accelerators that programs compile for, and their public figures.

Memory, bandwidths and peaks are the makers' data sheets (dense bf16); links are counted one way. Those of GPUs that XLA
asks for beside them are what its own target descriptions say of the device (openxla/xla, `target_config/specs`).
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxpar.presets import DeviceKind


@dataclass(frozen=True)
class TpuKind:
    """A TPU generation: `device` without the size of its slice, and how many dimensions its torus has."""

    device: DeviceKind
    dimensions: int


@dataclass(frozen=True)
class GpuKind:
    """A GPU: its streaming multiprocessors, bytes of L2 cache, clock in GHz, memory as CUDA reports it, capability."""

    device: DeviceKind
    cores: int
    l2_bytes: int
    clock_ghz: float
    memory_bytes: int
    capability: int


def _tpu(
    kind: str, memory: float, flops: float, memory_bandwidth: float, links: float, dimensions: int, across: float
) -> TpuKind:
    # Nominal, nobody's measurement: a hop between chips takes 1 us, a step over the data centre's network 50 us.
    device = DeviceKind(kind, int(memory), flops, memory_bandwidth, links, across, 1, 1e-6, 50e-6, "torus")
    return TpuKind(device, dimensions)


TPUS = {
    "v5e": _tpu("TPU v5e", 16e9, 197e12, 0.82e12, 200e9, 2, 6.25e9),
    "v5p": _tpu("TPU v5p", 95e9, 459e12, 2.77e12, 600e9, 3, 6.25e9),
    "v6e": _tpu("TPU v6e", 32e9, 918e12, 1.64e12, 448e9, 2, 6.25e9),
    # Two devices a chip, each with half of what it has.
    "tpu7x": _tpu("TPU7x", 96e9, 1153e12, 3.69e12, 300e9, 3, 6.25e9),
}
"""TPU generations by the name that a topology begins with; a device is one of the program's, of which tpu7x has two."""

GPUS = {
    "h100": GpuKind(
        DeviceKind("NVIDIA H100", int(80e9), 989e12, 3.35e12, 450e9, 50e9, 8), 132, 52428800, 1.98, 84942979072, 9
    ),
    "h200": GpuKind(
        DeviceKind("NVIDIA H200", int(141e9), 989e12, 4.8e12, 450e9, 50e9, 8), 132, 52428800, 1.98, 151397597184, 9
    ),
    "h20": GpuKind(
        DeviceKind("NVIDIA H20", int(96e9), 148e12, 4.0e12, 450e9, 50e9, 8), 78, 62914560, 1.98, 102000000000, 9
    ),
    "b200": GpuKind(
        DeviceKind("NVIDIA B200", int(192e9), 2250e12, 8.0e12, 900e9, 50e9, 8),
        148, 132644864, 1.965, 191514411008, 10,
    ),
}  # fmt: skip
"""GPUs by the name that a target begins with."""


_KNOWN = {"NVIDIA H20": "NVIDIA H200"}
"""Kinds that JAX does not know -> one that it does, of the same architecture: Pallas asks it for that."""


def gpu_target_config(kind: GpuKind) -> str:
    """XLA's GpuTargetConfigProto of a GPU, as text."""
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  core_count: {kind.cores} fpus_per_core: 128 clock_rate_ghz: {kind.clock_ghz}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: {int(kind.device.memory_bandwidth)} device_memory_size: {kind.memory_bytes}
  l2_cache_size: {kind.l2_bytes} registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {kind.capability} feature_extension: ACCELERATED_FEATURES }}
}}
device_description_str: "{_KNOWN.get(kind.device.kind, kind.device.kind)}"
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
"""
