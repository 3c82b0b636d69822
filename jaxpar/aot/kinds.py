"""What the compiler of GPUs asks for of the kinds of `jaxpar/kinds.py`, beside their public figures.

It is what XLA's own target descriptions say of the device (openxla/xla, `target_config/specs`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from jaxpar.kinds import KINDS
from jaxpar.presets import DeviceKind


@dataclass(frozen=True)
class GpuKind:
    """A GPU: streaming multiprocessors, bytes of L2 cache, clock in GHz, memory as CUDA reports it, and capability."""

    device: DeviceKind
    cores: int
    l2_bytes: int
    clock_ghz: float
    memory_bytes: int
    capability: int


GPUS: Mapping[str, GpuKind] = MappingProxyType(
    {
        "h100": GpuKind(KINDS["h100"], 132, 52428800, 1.98, 84942979072, 9),
        "h200": GpuKind(KINDS["h200"], 132, 52428800, 1.98, 151397597184, 9),
        "h20": GpuKind(KINDS["h20"], 78, 62914560, 1.98, 102000000000, 9),
        "b200": GpuKind(KINDS["b200"], 148, 132644864, 1.965, 191514411008, 10),
    }
)
"""GPUs by the name that a target begins with."""


_KNOWN = {"NVIDIA H20": "NVIDIA H200"}
"""Kinds that JAX does not know -> one that it does, of the same architecture: Pallas asks it for that."""


def gpu_target_config(gpu: GpuKind) -> str:
    """XLA's GpuTargetConfigProto of a GPU, as text."""
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  core_count: {gpu.cores} fpus_per_core: 128 clock_rate_ghz: {gpu.clock_ghz}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: {int(gpu.device.memory_bandwidth)} device_memory_size: {gpu.memory_bytes}
  l2_cache_size: {gpu.l2_bytes} registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {gpu.capability} feature_extension: ACCELERATED_FEATURES }}
}}
device_description_str: "{_KNOWN.get(gpu.device.kind, gpu.device.kind)}"
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
"""
