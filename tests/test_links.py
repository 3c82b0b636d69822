"""The alpha-beta model of a preset's links, and the sum that `auto` takes by it."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console
from test_registry import CONFIG

from jaxpar.assets import model_dir
from jaxpar.checkpoint.hf_config import read_config
from jaxpar.errors import PlanError
from jaxpar.ledger.render import render
from jaxpar.ledger.report import make_ledger
from jaxpar.links import Fit, Links
from jaxpar.mesh import MeshSpec
from jaxpar.plan import Plan
from jaxpar.presets import load_preset
from jaxpar.registry import chosen, find, reasons
from jaxpar.strategies import Step

CARD = read_config(model_dir("qwen3-235b-a22b"))
KIB, MIB = 1024, 1024**2


def a_step(plan: Plan, lanes: int) -> Step:
    """A decode step of Qwen3-235B-A22B: 8 KiB of a sum for each lane in bfloat16."""
    return Step(CARD, plan, "decode", lanes=lanes, tokens=1, keys=1024)


def on_preset(name: str, mesh: str, **fields: object) -> Plan:
    preset = load_preset(name)
    given = {**preset.plan_fields, "all_reduce": "auto", "dtype": "bfloat16", "experts_over": ("ep",), **fields}
    return Plan(MeshSpec.parse(mesh), **given)


def test_a_message_takes_its_steps_and_its_bytes() -> None:
    links = Links(1e9, 1e-6, 1e8, 1e-5)
    assert links.seconds("all_gather", 1000, 5) == pytest.approx(1e-6 + 4e-6)
    assert links.seconds("all_reduce", 1000, 1, across=4) == pytest.approx(2e-5 + 1500e-8)
    torus = Links(1e9, 1e-6, 1e8, 1e-5, "torus")
    # Half a round of eight for what goes to all, one hop to a neighbour.
    assert torus.seconds("all_gather", 1000, 8) == pytest.approx(4e-6 + 7e-6)
    assert torus.seconds("ppermute", 1000, 8) == pytest.approx(1e-6 + 1e-6)
    assert torus.seconds("ppermute", 1000, 8, distance=6) == pytest.approx(2e-6 + 2e-6)


def test_a_group_with_several_ranks_on_several_nodes_goes_by_levels_where_that_is_faster() -> None:
    links = Links(1e9, 1e-6, 1e8, 1e-5)
    inside = {name: links.seconds(name, 4_000, 4) for name in ("reduce_scatter", "all_gather", "all_to_all")}
    assert links.seconds("all_reduce", 16_000, 4, across=2) == pytest.approx(
        links.seconds("reduce_scatter", 16_000, 4)
        + links.seconds("all_reduce", 4_000, 1, across=2)
        + inside["all_gather"]
    )
    assert links.seconds("reduce_scatter", 4_000, 4, across=2) == pytest.approx(
        inside["reduce_scatter"] + links.seconds("reduce_scatter", 1_000, 1, across=2)
    )
    assert links.seconds("all_gather", 4_000, 4, across=2) == pytest.approx(
        links.seconds("all_gather", 4_000, 1, across=2) + links.seconds("all_gather", 8_000, 4)
    )
    assert links.seconds("all_to_all", 8_000, 4, across=2) == pytest.approx(
        links.seconds("all_to_all", 8_000, 1, across=2) + inside["all_to_all"]
    )
    # What a few bytes cost is latency: all at once by the slow links, in their two steps.
    assert links.seconds("all_reduce", 8, 4, across=2) == pytest.approx(2e-5 + 14e-8)
    # A ring has a hop between nodes, and all wait for it.
    assert links.seconds("ppermute", 1_000, 4, across=2) == pytest.approx(1e-5 + 1e-5)


def test_what_was_measured_counts_before_the_links() -> None:
    lines = ((3e-6, 2e-9), (9e-6, 1e-9))
    links = Links(1e9, 1e-6, 1e8, 1e-5, fits=(Fit("all_reduce", 4, "inside", lines),))
    assert links.seconds("all_reduce", 1_000, 4) == pytest.approx(5e-6)
    assert links.seconds("all_reduce", 10_000, 4) == pytest.approx(19e-6)
    # Two ranks send two thirds of the bytes of four.
    assert links.seconds("all_reduce", 15_000, 2) == pytest.approx(19e-6)
    assert links.seconds("all_gather", 1_000, 4) == pytest.approx(1e-6 + 3e-6)
    assert links.seconds("all_reduce", 1_000, 1, across=4) == pytest.approx(2e-5 + 1500e-8)


def test_the_nearest_number_of_ranks_is_taken() -> None:
    fits = tuple(Fit("all_to_all", ranks, "inside", ((ranks * 1e-6, 0.0),)) for ranks in (2, 8))
    links = Links(1e9, 1e-6, 1e8, 1e-5, fits=fits)
    assert [links.seconds("all_to_all", 64, ranks) for ranks in (2, 3, 6, 8, 64)] == [2e-6, 2e-6, 8e-6, 8e-6, 8e-6]


def test_default_latencies_explain_what_a_sum_takes_on_8_h200() -> None:
    links = load_preset("h200-8").device.links
    # 22.6 us for 256 KiB and 33 us for 512 KiB.
    assert 20e-6 < links.seconds("all_reduce", 256 * KIB, 8) < 23e-6
    assert 20e-6 < links.seconds("all_reduce", 512 * KIB, 8) < 33e-6


def test_small_messages_go_in_one_shot_and_large_ones_by_the_backends_sum() -> None:
    plan = on_preset("h200-8", "tp=8")
    assert [chosen(a_step(plan, lanes))["all_reduce"].name for lanes in (1, 8, 64)] == ["one_shot"] * 3
    assert [chosen(a_step(plan, lanes))["all_reduce"].name for lanes in (256, 4096)] == ["psum"] * 2
    reason = reasons(a_step(plan, 1))["all_reduce"].reason
    assert reason.startswith("takes ") and all(f", {name} " in reason for name in ("psum", "ring", "tree", "two_shot"))
    assert "int8" not in reason


def test_large_sums_across_nodes_go_by_two_levels() -> None:
    plan = on_preset("h200-8", "tp=16")
    assert chosen(a_step(plan, 4096))["all_reduce"].name == "two_level"
    assert chosen(a_step(plan, 1))["all_reduce"].name == "one_shot"


def test_a_mesh_that_says_nothing_of_its_links_gets_the_backends_sum_and_a_reason() -> None:
    step = a_step(Plan(MeshSpec(tp=8), all_reduce="auto"), 1)
    assert chosen(step)["all_reduce"].name == "psum"
    assert reasons(step)["all_reduce"].reason.startswith("the mesh says nothing of its links")


def test_where_nothing_is_summed_there_is_nothing_to_choose() -> None:
    step = a_step(on_preset("h200-8", "ep=8"), 1)
    assert chosen(step)["all_reduce"].name == "psum"
    assert "all_reduce" not in reasons(step)


def test_links_are_a_value_of_the_plan() -> None:
    with pytest.raises(PlanError, match=r"^links=3: give a Links value, or a preset as the mesh"):
        Plan(links=3)


@pytest.mark.parametrize(
    ("mesh", "nodes", "said"),
    [
        ("tp=8", 0, "needs a sum over more than one node, and with no devices_per_node those of mesh tp=8 stay on one"),
        ("dp=2,tp=4", 4, "with devices_per_node=4 those of mesh dp=2,tp=4 stay on one"),
        ("tp=8", 3, "nodes of 3 devices split the ranks of tp=8 unevenly"),
        (
            "cp=2,tp=4",
            2,
            "nodes of 2 devices end inside tp=4, and a sum over cp=2, tp=4 needs nodes that hold whole axes",
        ),
        (
            "cp=4,tp=4",
            8,
            "nodes of 8 devices end inside cp=4, and a sum over cp=4, tp=4 needs nodes that hold whole axes",
        ),
        ("cp=4,tp=4", 8, "whole axes: use tp=8, or devices_per_node=4"),
    ],
)
def test_two_levels_need_sums_that_cross_nodes_evenly(mesh: str, nodes: int, said: str) -> None:
    plan = Plan(MeshSpec.parse(mesh), all_reduce="two_level", devices_per_node=nodes)
    with pytest.raises(PlanError) as refused:
        chosen(a_step(plan, 1))
    assert said in str(refused.value)


def test_qwen3_235b_sends_164_mib_in_188_sums_of_512_kib_and_376_steps_a_decode_step() -> None:
    plan = Plan(MeshSpec(tp=8), dtype="bfloat16", experts_over=("ep",))
    rows = find("all_reduce", "psum").traffic(a_step(plan, 64))
    assert sum(row.calls for row in rows) == 188
    assert {row.message_bytes for row in rows} == {512 * KIB}
    assert {row.sent_bytes / row.calls for row in rows} == {0.875 * MIB}
    assert sum(row.sent_bytes for row in rows) == 164.5 * MIB
    assert sum(row.steps for row in rows) == 376


def test_the_ledger_shows_steps_beside_bytes_and_what_auto_took_and_why() -> None:
    links = Links(1e9, 1e-5, 1e8, 1e-5)
    plan = Plan(MeshSpec(tp=4), all_reduce="auto", links=links)
    ledger = make_ledger(replace(CONFIG, num_hidden_layers=1, windows=(None,)), plan, "decode", 2, 8)
    assert ledger.differences == []
    document = ledger.to_json()
    assert {row["steps"] for row in document["traffic"] if row["strategy"] == "one_shot"} == {1}
    assert document["sent_steps"] == sum(row["steps"] for row in document["traffic"])
    assert document["steps"][0]["auto"]["all_reduce"]["name"] == "one_shot"
    Console(file=(written := StringIO()), width=200).print(render(ledger))
    text = written.getvalue()
    assert "Chosen by auto" in text and "us a step by its links, psum " in text
    (heading,) = [line.split() for line in text.splitlines() if line.startswith("strategy ") and "calls" in line]
    assert heading == ["strategy", "collective", "axes", "calls", "steps", "message", "sent", "a", "call", "sent"]
