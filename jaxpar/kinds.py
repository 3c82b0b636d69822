"""Kinds of accelerators by short name, with their makers' public figures: what a cluster or a compile target is of.

Dense bf16 FLOP/s, memory, its bandwidth, and the bandwidth of a device's links one way. Between nodes GPUs have a
400 Gb/s card each; of TPUs a node is a slice, whose chips are a torus, and slices are joined by a data centre's
network. Latencies are nominal where no preset has measured ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from jaxpar.presets import DeviceKind


def _gpu(kind: str, memory: float, tflops: float, bandwidth: float, link: float, node: int = 8) -> DeviceKind:
    return DeviceKind(
        kind=kind,
        memory_bytes=int(memory),
        peak_bf16_flops=tflops * 1e12,
        peak_fp8_flops=2 * tflops * 1e12,
        memory_bandwidth=bandwidth,
        link_bandwidth=link,
        internode_bandwidth=50e9,
        devices_per_node=node,
    )


def _tpu(kind: str, memory: float, tflops: float, bandwidth: float, link: float, slice_: int) -> DeviceKind:
    return DeviceKind(
        kind=kind,
        memory_bytes=int(memory),
        peak_bf16_flops=tflops * 1e12,
        memory_bandwidth=bandwidth,
        link_bandwidth=link,
        internode_bandwidth=6.25e9,
        devices_per_node=slice_,
        link_latency=1e-6,
        internode_latency=50e-6,
        topology="torus",
    )


KINDS: Mapping[str, DeviceKind] = MappingProxyType(
    {
        "h100": _gpu("NVIDIA H100", 80e9, 989, 3.35e12, 450e9),
        "h200": _gpu("NVIDIA H200", 141e9, 989, 4.8e12, 450e9),
        "h20": _gpu("NVIDIA H20", 96e9, 148, 4.0e12, 450e9),
        "b200": _gpu("NVIDIA B200", 192e9, 2250, 8.0e12, 900e9, node=72),
        "v5e": _tpu("TPU v5e", 16e9, 197, 0.82e12, 200e9, 256),
        "v5p": _tpu("TPU v5p", 95e9, 459, 2.77e12, 600e9, 8960),
        "v6e": _tpu("TPU v6e", 32e9, 918, 1.64e12, 448e9, 256),
        # Two devices a chip, each with half of what it has.
        "tpu7x": _tpu("TPU7x", 96e9, 1153, 3.69e12, 300e9, 18432),
    }
)
"""`devices_per_node` is the most that fast links join: of GPUs a node, of TPUs the largest slice."""

SIDES: Mapping[str, int] = MappingProxyType({"v5e": 2, "v5p": 3, "v6e": 2, "tpu7x": 3})
"""Of TPU generations: how many sides the torus of a slice has."""

DEVICES_A_CHIP: Mapping[str, int] = MappingProxyType({"tpu7x": 2})
"""Of kinds whose chips are several devices of a program: how many."""
