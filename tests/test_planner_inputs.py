"""What a planner is asked: workloads, clusters and assumptions, refused in a line where they cannot be."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

from jaxpar.assets import model_dir
from jaxpar.checkpoint import read_config
from jaxpar.errors import JaxparError
from jaxpar.kinds import KINDS
from jaxpar.planner.assumptions import Assumptions, ideal
from jaxpar.planner.cluster import Cluster
from jaxpar.planner.rates import rates_of
from jaxpar.planner.workload import Targets, Workload

LLAMA = replace(read_config(model_dir("llama-3.1-8b")), max_position_embeddings=131072)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"input": -5, "output": 500}, "input=-5: it must be a whole number of at least 1"),
        ({"input": 4000, "output": 0}, "output=0: it must be a whole number of at least 1"),
        ({"input": 4000.5, "output": 1}, "input=4000.5: it must be"),
        ({"input": 4000, "output": 500, "prefix": 5000}, "prefix=5000 of input=4000 tokens"),
        ({"input": 4000, "output": 500, "prefix": 4000}, "use prefix <= 3999"),
        ({"input": 4000, "output": 500, "concurrency": 0}, "concurrency=0"),
        ({"input": 200_000, "output": 500}, "200500 tokens, more than the model's 131072 positions"),
    ],
)
def test_a_workload_that_cannot_be_is_refused_with_its_numbers(asked: dict[str, int], message: str) -> None:
    with pytest.raises(JaxparError, match=message.replace("(", r"\(")) as refusal:
        Workload(**asked).check(LLAMA)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("time", [0, -1.0, float("nan"), float("inf")])
def test_a_target_is_a_time_above_0(time: float) -> None:
    with pytest.raises(JaxparError, match="a time is above 0"):
        Targets(ttft=time)


@pytest.mark.parametrize(
    ("text", "devices", "per_node", "nodes", "target"),
    [
        ("h200-8x4", 32, 8, 4, "h200:1x4x8"),
        ("h100-8", 8, 8, 1, "h100:1x1x8"),
        ("h200-3", 3, 3, 1, "h200:1x1x3"),
        ("b200-72", 72, 72, 1, "b200:1x1x72"),
        ("v5p-4x4x4", 64, 64, 1, "v5p:4x4x4"),
        ("v5e-4x8", 32, 32, 1, "v5e:4x8"),
        ("tpu7x-4x4x4", 128, 128, 1, "tpu7x:4x4x4"),
        ("h20-32", 32, 8, 4, None),
        ("h20-32:64", 64, 8, 8, None),
    ],
)
def test_a_cluster_has_exactly_the_devices_that_were_asked_for(
    text: str, devices: int, per_node: int, nodes: int, target: str | None
) -> None:
    cluster = Cluster.parse(text)
    assert (cluster.devices, cluster.devices_per_node, cluster.nodes) == (devices, per_node, nodes)
    assert cluster.target == target


def test_a_cluster_may_be_of_any_chip_that_a_toml_describes(tmp_path: Path) -> None:
    chip = tmp_path / "mine.toml"
    chip.write_text(
        'description = "a chip"\n[mesh]\ntp = 4\n[device]\nkind = "mine"\nmemory_bytes = 1e9\npeak_bf16_flops = 1e12\n'
        "memory_bandwidth = 1e11\nlink_bandwidth = 1e10\ninternode_bandwidth = 1e9\ndevices_per_node = 4\n"
    )
    assert Cluster.parse(str(chip)).devices == 4
    assert Cluster.parse(f"{chip}:12").nodes == 3


def test_a_kind_has_the_figures_of_its_calibrated_preset() -> None:
    assert Cluster.parse("h200-8").device.efficiency["bfloat16"] == 0.77
    assert not Cluster.parse("h100-8").device.efficiency


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h300-8", "the kinds are h100"),
        ("h200", "write a cluster as"),
        ("h200-0x4", "write a cluster as"),
        ("h200-16x2", "fast links join 8 NVIDIA H200 at most: write h200-8x4"),
        ("h200-8x4x2", "GPUs are devices a node x nodes"),
        ("v5p-4x4", "a torus of 3 sides"),
        ("v5e-32x32", "a slice of TPU v5e has 256 at most"),
        ("h20-32:12", "use 8 or 16"),
        ("h200-8x100000", "more than 65536"),
        ("", "write a cluster as"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused_with_what_can(text: str, message: str) -> None:
    with pytest.raises(JaxparError, match=message):
        Cluster.parse(text)


def test_every_assumption_says_what_it_is_and_can_be_set() -> None:
    assumed = Assumptions()
    for one in fields(Assumptions):
        assert assumed.names()[one.name]
        value = getattr(assumed, one.name)
        assert assumed.set([f"{one.name}={value}"]) == assumed
    assert assumed.set(["imbalance=1.5", "fused=true", "kv_dtype=fp8"]) == Assumptions(
        imbalance=1.5, fused=True, kv_dtype="fp8"
    )


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("nothing=1", "write name=value, of weight_dtype"),
        ("imbalance", "write name=value"),
        ("imbalance=0.5", "imbalance=0.5: it must be from 1 to"),
        ("imbalance=much", "it must be a number"),
        ("reserve=nan", "it must be a number"),
        ("expert_tile=1.5", "it must be a whole number"),
        ("fused=maybe", "it must be true or false"),
        ("kv_dtype=fp7", "use one of float32"),
        ("queue=long", "use none or md1"),
    ],
)
def test_an_assumption_that_cannot_be_is_refused(setting: str, message: str) -> None:
    with pytest.raises(JaxparError, match=message):
        Assumptions().set([setting])


def test_what_is_set_wins_over_the_device_and_the_device_over_what_is_typical() -> None:
    measured, unmeasured = Cluster.parse("h200-8").device, KINDS["h200"]
    assert rates_of(measured, Assumptions(), "bfloat16").matrices == 0.77 * 989e12
    assert rates_of(measured, Assumptions(matmul_efficiency=0.5), "bfloat16").matrices == 0.5 * 989e12
    assert rates_of(unmeasured, Assumptions(), "bfloat16").matrices == 0.75 * 989e12
    whole = rates_of(measured, ideal(weight_dtype="fp8"), "bfloat16")
    assert (whole.matrices, whole.wide, whole.memory, whole.kernel) == (1978e12, 989e12, 4.8e12, 0)


def test_a_device_without_8_bit_products_multiplies_8_bit_weights_as_it_does_16_bit_ones() -> None:
    rates = rates_of(KINDS["v5p"], Assumptions(weight_dtype="fp8"), "bfloat16")
    assert rates.matrices == rates.wide == 0.75 * 459e12 and rates.weight_bytes == 1


def test_refusing_needs_no_jax() -> None:
    code = (
        "import sys, jaxpar.planner.workload, jaxpar.planner.cluster, jaxpar.planner.assumptions\n"
        "assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
