"""Which links a row of the ledger crosses, and how long it takes over them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxpar.ledger.traffic import SENT_BYTES, Traffic
from jaxpar.mesh import MeshSpec
from jaxpar.nodes import members
from jaxpar.planner.network import group, seconds
from jaxpar.presets import load_preset

H200 = load_preset("h200-8").device
KIB, MIB = 1024, 1024**2


def a_row(collective: str, axes: tuple[str, ...], size: int, ranks: int, calls: int = 1) -> Traffic:
    return Traffic("attention", "psum", collective, axes, calls, size, calls * SENT_BYTES[collective](size, ranks))


@pytest.mark.parametrize(
    ("mesh", "node", "axes", "found"),
    [
        ("dp=2,cp=2,tp=4", 8, ("tp",), (4, 1)),
        ("dp=2,cp=2,tp=4", 8, ("dp",), (1, 2)),
        ("dp=2,cp=2,tp=4", 8, ("dp", "tp"), (4, 2)),
        ("dp=2,cp=2,tp=4", 8, ("cp", "tp"), (8, 1)),
        ("dp=2,cp=2,tp=4", 4, ("cp", "tp"), (4, 2)),
        ("tp=16", 8, ("tp",), (8, 2)),
        ("ep=32,tp=2", 8, ("ep",), (4, 8)),
        ("ep=32,tp=2", 0, ("ep",), (32, 1)),
        ("tp=4", 8, ("tp",), (4, 1)),
        ("dp=2,tp=6", 4, ("tp",), (4, 2)),
    ],
)
def test_nodes_are_consecutive_ranks(mesh: str, node: int, axes: tuple[str, ...], found: tuple[int, int]) -> None:
    assert members(MeshSpec.parse(mesh), node, axes) == found


def test_a_row_takes_its_calls_over_the_links_that_its_axes_cross() -> None:
    mesh = MeshSpec.parse("dp=2,tp=8")
    inside = a_row("all_reduce", ("tp",), MIB, 8, calls=10)
    assert seconds(inside, mesh, H200) == pytest.approx(10 * (20e-6 + 1.75 * MIB / 450e9))
    across = a_row("all_gather", ("dp",), MIB, 2)
    assert seconds(across, mesh, H200) == pytest.approx(15e-6 + MIB / 50e9)
    both = a_row("all_reduce", ("dp", "tp"), 64 * MIB, 16)
    assert seconds(both, mesh, H200) == pytest.approx(
        (10e-6 + 56 * MIB / 450e9) + (30e-6 + 8 * MIB / 50e9) + (10e-6 + 56 * MIB / 450e9)
    )
    assert seconds(replace(inside, calls=0, sent_bytes=0), mesh, H200) == 0


def test_a_sum_of_16_ranks_on_two_nodes_costs_its_levels_and_no_multiple_of_one_node() -> None:
    eight, sixteen = (a_row("all_reduce", ("tp",), 512 * KIB, ranks) for ranks in (8, 16))
    ratio = seconds(sixteen, MeshSpec(tp=16), H200) / seconds(eight, MeshSpec(tp=8), H200)
    assert 2 < ratio < 3


def test_parts_of_an_axis_are_groups_of_one_node_or_of_one_rank_of_each() -> None:
    mesh = MeshSpec(tp=32)
    one_node = replace(a_row("reduce_scatter", ("tp",), MIB, 8), ranks=8)
    of_each = replace(one_node, strategy="two_level", ranks=4)
    assert [group(row, mesh, 8) for row in (one_node, of_each)] == [(8, 1), (1, 4)]
    assert group(replace(one_node, ranks=16), mesh, 8) == (8, 2)


def test_the_calibrated_h200_sums_as_public_tables_say() -> None:
    device = load_preset("h200-calibrated-8").device
    for size, tables in ((512 * KIB, 3.25e-6 + 7 * 512 * KIB / 292e9), (4 * MIB, 30e-6 + 7 * MIB / 450e9)):
        row = a_row("all_reduce", ("tp",), size, 8)
        assert seconds(row, MeshSpec(tp=8), device) == pytest.approx(tables, rel=0.15)
    assert (device.flops("bfloat16"), device.flops("fp8")) == (0.77 * 989e12, 0.58 * 1978e12)
