"""What a dispatch sends and computes follows from the routing: how often its loops run, and what `auto` makes of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import run
from hypothesis import given
from hypothesis import strategies as st
from oracle_data import ROOT
from test_expert_ledger import EXPERTS

from jaxpar.checkpoint.config import ModelConfig
from jaxpar.errors import PlanError
from jaxpar.ledger.report import make_ledger
from jaxpar.ledger.rounds import all_flops, all_rounds, count_rounds, in_words, loads_of
from jaxpar.ledger.traffic import Traffic
from jaxpar.mesh import MeshSpec
from jaxpar.moe.dispatch.sizes import even_copies, likely_copies
from jaxpar.nodes import levels
from jaxpar.plan import Phase, Plan
from jaxpar.presets import load_preset
from jaxpar.registry import chosen, find, reasons
from jaxpar.strategies import Step

MIB = 2**20


def a_model(experts: int, choices: int, hidden: int) -> ModelConfig:
    moe = EXPERTS.moe
    assert moe is not None
    router = moe.router.__class__(**{**vars(moe.router), "top_k": choices})
    moe = moe.__class__(**{**vars(moe), "num_experts": experts, "router": router})
    return EXPERTS.__class__(**{**vars(EXPERTS), "moe": moe, "hidden_size": hidden})


def a_step(
    mesh: str, tokens: int, phase: Phase = "prefill", config: ModelConfig = EXPERTS, lanes: int = 1, **fields: Any
) -> Step:
    return Step(config, Plan(MeshSpec.parse(mesh), **fields), phase, lanes, tokens, keys=16)


def dispatched(step: Step) -> list[Traffic]:
    return chosen(step)["moe_dispatch"].traffic(step)


# Bytes


def test_512_tokens_of_4096_values_in_16_bits_to_8_of_their_experts_on_8_ranks_send_3_5_mib_each_way() -> None:
    step = a_step(
        "ep=8", 64, config=a_model(64, 8, 4096), dtype="bfloat16", moe_dispatch="all_to_all", moe_capacity=1.0
    )
    rows = [row for row in dispatched(step) if row.message_bytes >= MIB]
    assert [(row.calls, row.sent_bytes, row.per) for row in rows] == [(2 * 2, 2 * 2 * 7 * MIB // 2, "")]


def test_one_copy_for_each_rank_sends_as_many_rows_less_as_choices_fall_on_the_same_rank() -> None:
    config = a_model(64, 4, 4096)
    copies = even_copies(4, 8, 8)
    assert copies == 1 - math.comb(56, 4) / math.comb(64, 4)
    sent = [
        max(
            row.message_bytes
            for row in dispatched(a_step("ep=8", 64, config=config, moe_dispatch="all_to_all", **more))
        )
        for more in ({}, {"moe_deduplicate": True})
    ]
    assert sent == [8 * 48 * 4096 * 4, 8 * math.ceil(1.5 * 64 * copies) * 4096 * 4]


def test_across_nodes_a_token_goes_once_to_each_and_once_to_itself_at_most() -> None:
    config = a_model(64, 4, 4096)
    step = a_step("dp=2,tp=4", 64, config=config, experts_over="dp,tp", devices_per_node=4, moe_dispatch="two_level")
    rows = {row.axes: row.message_bytes for row in dispatched(step) if row.message_bytes >= 4096 * 4}
    # tp deals the 64 tokens out, 16 to each rank; nearly all have choices on both nodes.
    assert rows == {
        ("dp",): 2 * 16 * 4096 * 4,
        ("tp",): 4 * math.ceil(1.5 * 2 * 16 * even_copies(4, 8, 8)) * 4096 * 4,
    }


# Rounds


def test_even_loads_take_one_round_of_every_loop() -> None:
    config = a_model(16, 3, 24)
    loads = loads_of(config, None)
    for mesh, fields in (("ep=8", {}), ("dp=2,ep=2,tp=2", {"experts_over": "dp,ep,tp", "devices_per_node": 4})):
        for dispatch in ("all_to_all", "ragged", "two_level") if fields else ("all_to_all", "ragged"):
            for per_rank in (False, True):
                step = a_step(mesh, 40, config=config, moe_dispatch=dispatch, moe_deduplicate=per_rank, **fields)
                assert {*np.ravel([*count_rounds(step, loads).values()])} <= {1}


def test_rounds_of_a_layer_are_those_of_its_fullest_rank() -> None:
    # 32 choices of a rank: 16 go to the fullest of four in the first layer, all in the second; 12 fit.
    loads = np.array([[3, 3, 2, 1, 2, 1], [1, 0, 0, 0, 0, 0]])
    step = a_step("ep=4", 16, moe_dispatch="all_to_all")
    assert count_rounds(step, loads) == {"rounds": [2, 3]}
    # Of 16 tokens 12 have a choice on the fullest rank, where 12 fit; and 16 in the second layer.
    step = a_step("ep=4", 16, moe_dispatch="all_to_all", moe_deduplicate=True)
    assert count_rounds(step, loads)["rounds"] == [1, 2]
    assert count_rounds(a_step("ep=4", 16, moe_dispatch="standard"), loads) == {}
    assert count_rounds(a_step("ep=4", 16, moe_dispatch="all_to_all", moe_capacity=1.0), loads) == {}
    assert count_rounds(a_step("tp=2", 16), loads) == {}


def test_experts_that_do_not_divide_make_the_ranks_that_have_most_the_fullest() -> None:
    # Of 5 experts over 4 ranks two have two: 2/5 of 200 choices, where 1.5/4 fit.
    config = a_model(5, 2, 24)
    assert count_rounds(a_step("ep=4", 100, config=config, moe_dispatch="all_to_all"), loads_of(config, None)) == {
        "rounds": [2, 2]
    }


def test_rounds_across_nodes_are_those_of_the_fullest_node_and_inside_it_those_of_its_fullest_rank() -> None:
    fields = {"experts_over": "dp,tp", "devices_per_node": 2, "moe_dispatch": "two_level"}
    step = a_step("dp=2,tp=2", 64, config=a_model(8, 1, 24), **fields)
    on_one_rank, on_one_node = [1, 1, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0]
    # Of 32 tokens of a rank 24 fit into a round to a node; 64 come from two nodes, of which 24 fit for a rank.
    assert count_rounds(step, np.array([on_one_rank, on_one_node])) == {
        "node_rounds": [2, 2],
        "rounds": [2, 1],
        "blocks": [1, 1],
    }


@given(st.integers(1, 8), st.integers(1, 6), st.integers(1, 8))
def test_copies_under_even_routing_are_more_than_choices_drawn_one_by_one_would_make(
    ranks: int, slots: int, choices: int
) -> None:
    choices = min(choices, ranks * slots)
    even = even_copies(choices, ranks, slots)
    assert likely_copies(choices, 1 / ranks) <= even + 1e-12
    assert even <= min(1, choices / ranks) + 1e-12


def test_totals_have_every_iteration_of_every_layer_in_them() -> None:
    rounds = {"node_rounds": [1, 2], "rounds": [3, 1]}
    row = Traffic("moe_dispatch", "two_level", "all_to_all", ("tp",), 4, 16, 48, per="node_rounds*rounds")
    assert all_rounds(row, rounds) == Traffic(
        "moe_dispatch", "two_level", "all_to_all", ("tp",), 10, 16, 120, per="node_rounds*rounds"
    )
    assert in_words(row.per, rounds) == " x 1 to 2 node rounds x 1 to 3 rounds"
    assert in_words("rounds", {"rounds": [1, 1]}) == " x 1 round"
    assert in_words("iterations", rounds) == " per iterations"
    flops = {"moe": 7, "experts per node_rounds*rounds": 20, "odd per iterations": 3}
    assert all_flops(flops, rounds) == {"moe": 7, "experts": 50, "odd per iterations": 3}


def test_a_ledger_counts_the_rounds_that_loads_make() -> None:
    plan = Plan(MeshSpec(ep=4), moe_dispatch="all_to_all")
    even, skewed = (
        make_ledger(EXPERTS, plan, "prefill", 4, 16, loads=loads) for loads in (None, [[1, 0, 0, 0, 0, 0]] * 2)
    )
    assert (even.differences, skewed.differences) == ([], [])
    assert (even.rounds, skewed.rounds) == ({"rounds": [1, 1]}, {"rounds": [3, 3]})
    assert [[row.calls for row in ledger.traffic if row.per] for ledger in (even, skewed)] == [[4], [12]]
    once, in_round = (sum(row.sent_bytes for row in even.traffic if bool(row.per) is per) for per in (False, True))
    assert (even.sent_bytes, skewed.sent_bytes) == (once + in_round, once + 3 * in_round)
    assert 3 * even.flops["experts"] == skewed.flops["experts"]
    assert even.to_json()["steps"][0]["rounds"] == {"rounds": [1, 1]}


@pytest.mark.parametrize(
    ("config", "loads", "said"),
    [
        (EXPERTS, [[1] * 6], "loads are of 1 layer and 6 experts, and the model has 2 layers with 6 experts: give a l"),
        (EXPERTS, [[1] * 7] * 2, "loads are of 2 layers and 7 experts, and the model has 2 layers with 6 experts"),
        (EXPERTS, [[1] * 5 + [-1]] * 2, "layer 0, expert 5 has the load -1.0: it must be from 0, and finite"),
        (a_model(6, 2, 24).__class__(**{**vars(EXPERTS), "moe": None}), [[1]], "loads are of experts, and this qwen3"),
    ],
)
def test_loads_of_another_model_are_refused(config: ModelConfig, loads: Any, said: str) -> None:
    with pytest.raises(PlanError, match=f"^{said}"):
        make_ledger(config, Plan(), "decode", 1, 4, loads=loads)


# Nodes


@pytest.mark.parametrize(
    ("mesh", "over", "node", "across", "inside", "both"),
    [
        ("dp=4,tp=8", "dp,tp", 8, ("dp",), ("tp",), ()),
        ("dp=4,tp=8", "dp", 8, ("dp",), (), ()),
        ("dp=2,ep=2,tp=2", "dp,ep,tp", 4, ("dp",), ("ep", "tp"), ()),
        ("dp=2,ep=2,tp=2", "dp,ep,tp", 2, ("dp", "ep"), ("tp",), ()),
        ("dp=2,ep=2,tp=2", "dp,ep,tp", 1, ("dp", "ep", "tp"), (), ()),
        ("dp=2,ep=2,tp=2", "dp,ep,tp", 0, (), ("dp", "ep", "tp"), ()),
        ("dp=2,ep=2,tp=2", "dp,ep,tp", 8, (), ("dp", "ep", "tp"), ()),
        ("dp=4,tp=4", "dp,tp", 8, (), ("tp",), ("dp",)),
        ("ep=2,cp=3,tp=2", "ep,tp", 4, (), ("tp",), ("ep",)),
        ("ep=2,cp=3,tp=2", "ep,tp", 6, ("ep",), ("tp",), ()),
        ("tp=12", "tp", 8, (), (), ("tp",)),
        ("tp=6", "tp", 8, (), ("tp",), ()),
    ],
)
def test_axes_of_experts_lie_across_nodes_or_inside_one(
    mesh: str, over: str, node: int, across: tuple[str, ...], inside: tuple[str, ...], both: tuple[str, ...]
) -> None:
    plan = Plan(MeshSpec.parse(mesh), experts_over=over, devices_per_node=node)
    assert levels(plan, plan.experts) == (across, inside, both)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"mesh": MeshSpec(dp=4, tp=4), "experts_over": "dp,tp", "devices_per_node": 8, "moe_dispatch": "two_level"},
            "moe_dispatch='two_level': dp=4 of mesh dp=4,tp=4 lies partly across nodes of 8 devices: choose sizes",
        ),
        (
            {"mesh": MeshSpec(dp=4, tp=4), "experts_over": "tp", "devices_per_node": 4, "moe_dispatch": "two_level"},
            "moe_dispatch='two_level' needs experts on more than one node, and with devices_per_node=4 experts over tp",
        ),
        (
            {"mesh": MeshSpec(ep=4), "moe_dispatch": "two_level"},
            "moe_dispatch='two_level' needs experts on more than one node, and with no devices_per_node experts over",
        ),
        (
            {"mesh": MeshSpec(ep=4), "moe_dispatch": "standard", "moe_deduplicate": True},
            "moe_deduplicate=True is for moe_dispatch='all_to_all' or 'ragged' or 'two_level', not for 'standard'",
        ),
        (
            {"mesh": MeshSpec(ep=4), "moe_dispatch": "ragged", "moe_capacity": 1.5},
            "moe_capacity=1.5 is for moe_dispatch='all_to_all', not for 'ragged': choose one of them, or leave it out",
        ),
        (
            {"mesh": MeshSpec(ep=4), "moe_dispatch": "standard", "single_batch_overlap": 2},
            "single_batch_overlap=2 is for moe_dispatch='all_to_all', not for 'standard': choose one of them, or leave",
        ),
    ],
)
def test_a_dispatch_refuses_what_it_cannot_do(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError) as raised:
        chosen(Step(EXPERTS, Plan(**fields), "prefill", 1, 8, 16))
    assert str(raised.value).startswith(said)


def test_options_of_a_dispatch_mean_nothing_on_one_device() -> None:
    plan = Plan(moe_dispatch="ragged", moe_deduplicate=True)
    assert chosen(Step(EXPERTS, plan, "prefill", 1, 8, 16))["moe_dispatch"].name == "local"


# What auto takes


@pytest.mark.parametrize(
    ("mesh", "fields", "prefill", "decode"),
    [
        ("ep=2", {}, "standard", "standard"),
        ("ep=16", {}, "all_to_all", "all_to_all"),
        ("ep=2", {"moe_deduplicate": True}, "all_to_all", "all_to_all"),
        ("ep=2", {"moe_capacity": 1.0}, "all_to_all", "all_to_all"),
        ("dp=2,tp=8", {"experts_over": "dp,tp", "devices_per_node": 8}, "two_level", "all_to_all"),
        ("dp=2,tp=8", {"experts_over": "tp", "devices_per_node": 8}, "all_to_all", "all_to_all"),
        ("dp=2,tp=8", {"experts_over": "dp,tp", "devices_per_node": 16}, "all_to_all", "all_to_all"),
        (
            "dp=2,tp=8",
            {"experts_over": "dp,tp", "devices_per_node": 8, "moe_capacity": 2.0},
            "all_to_all",
            "all_to_all",
        ),
    ],
)
def test_auto_takes_two_levels_for_prefill_across_nodes_and_else_what_sends_less(
    mesh: str, fields: dict[str, Any], prefill: str, decode: str
) -> None:
    config = a_model(64, 2, 512)
    prefills = a_step(mesh, 64, config=config, **fields)
    decodes = a_step(mesh, 1, phase="decode", config=config, lanes=64, **fields)
    assert [chosen(step)["moe_dispatch"].name for step in (prefills, decodes)] == [prefill, decode]


def test_what_auto_took_is_told_with_the_reason() -> None:
    step = a_step("ep=16,cp=2", 64, config=a_model(64, 2, 512))
    told = reasons(step)
    assert list(told) == ["prefill_attention", "moe_dispatch"]
    sent = {
        name: sum(row.sent_bytes for row in find("moe_dispatch", name).traffic(step))
        for name in ("standard", "all_to_all")
    }
    assert told["moe_dispatch"].name == "all_to_all" and sent["all_to_all"] < sent["standard"]
    assert told["moe_dispatch"].reason == "sends 1.407 MiB a step, standard 7.529 MiB"
    preset = load_preset("h20-32")
    plan = Plan(preset.mesh, **preset.plan_fields)
    why = reasons(Step(a_model(64, 2, 512), plan, "prefill", 1, 8, 16))["moe_dispatch"]
    assert why == ("two_level", "a prefill across 4 nodes of 8 devices")
    assert reasons(Step(EXPERTS, Plan(MeshSpec(ep=4), moe_dispatch="standard"), "prefill", 1, 8, 16)) == {}


# The command


EVEN = json.dumps([[1] * 8] * 2)


def ledger(*options: object) -> Any:
    return run("ledger", ROOT / "qwen3_moe", "--phase", "prefill", "--no-compile", "--context", 16, *options)


def test_the_command_shows_what_auto_took_and_the_rounds_that_loads_need(tmp_path: Path) -> None:
    table = ledger("--mesh", "ep=4")
    assert table.status == 0 and "Chosen by auto" in table.out and "sends" in table.out
    loads = tmp_path / "loads.json"
    loads.write_text(json.dumps([[1] * 8, [9, 0, 0, 0, 0, 0, 0, 0]]))
    options = ("--mesh", "dp=2,tp=2", "--experts-over", "dp,tp", "--moe-dispatch", "all_to_all", "--loads", loads)
    table = ledger(*options)
    assert table.status == 0 and "all_to_all x 1 to 3 rounds" in table.out and "Chosen by auto" not in table.out
    document = json.loads(ledger(*options, "--json").out)
    assert document["steps"][0]["rounds"] == {"rounds": [1, 3]}
    document = json.loads(
        ledger("--mesh", "dp=2,tp=2", "--experts-over", "dp,tp", "--devices-per-node", 2, "--json").out
    )
    assert document["steps"][0]["auto"]["moe_dispatch"]["name"] == "two_level"


@pytest.mark.parametrize(
    ("content", "options", "said"),
    [
        ("[[1, 2], [3]]", [], "layer 1 has 1 expert and layer 0 has 2"),
        ("[[1, 2]]", [], "loads are of 1 layer and 2 experts, and the model has 2 layers with 8 experts"),
        (None, [], "loads.json cannot be read: No such file"),
        (
            EVEN,
            ["--moe-dispatch", "rail"],
            "moe_dispatch='rail' is not a strategy: use all_to_all, auto, local, ragged",
        ),
        (EVEN, ["--moe-dispatch", "two_level"], "needs experts on more than one node"),
        (EVEN, ["--moe-capacity", "-1"], "moe_capacity=-1.0: it must be 0 (nothing is dropped) or above"),
        (EVEN, ["--experts-over", "pp"], "a pipeline stage keeps its own experts"),
    ],
)
def test_loads_and_options_that_cannot_be_are_refused_in_one_line(
    tmp_path: Path, content: str | None, options: list[str], said: str
) -> None:
    loads = tmp_path / "loads.json"
    if content is not None:
        loads.write_text(content)
    done = ledger("--mesh", "ep=4", "--loads", loads, *options)
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    assert said in done.err
