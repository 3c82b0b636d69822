"""`jaxpar mesh` and `jaxpar strategies`: tables for people, and the same as JSON."""

from __future__ import annotations

import json

from command_line import run

from jaxpar.registry import STRATEGIES


def test_the_rank_table_shows_the_axes_that_have_more_than_one_rank() -> None:
    done = run("mesh", "dp=2,tp=2")
    assert (done.status, done.err) == (0, "")
    assert done.out.splitlines()[:7] == [
        "dp=2,tp=2: 4 ranks",
        "",
        "rank  dp  tp",
        "   0   0   0",
        "   1   0   1",
        "   2   1   0",
        "   3   1   1",
    ]


def test_experts_over_axes_add_the_expert_rank_and_sizes_in_sglang_s_words() -> None:
    lines = run("mesh", "dp=2,cp=4,tp=2", "--experts-over", "dp,cp,tp").out.splitlines()
    assert lines[0] == "dp=2,cp=4,tp=2: 16 ranks, experts over dp,cp,tp"
    assert lines[2].split() == ["rank", "dp", "cp", "tp", "expert", "rank"]
    assert lines[3 + 13].split() == ["13", "1", "2", "1", "13"]
    assert lines[-1].startswith("In SGLang's words: attn_dp 2, attn_cp 4, attn_tp 2, tp_total 16")


def test_a_preset_says_what_its_devices_can_do() -> None:
    out = run("mesh", "sglang-16").out
    assert out.startswith("sglang-16: Two nodes of eight H200")
    assert "experts over dp,cp,tp" in out
    assert "Each device (NVIDIA H200): 141 GB, 989 TFLOP/s in bfloat16, 4.8 TB/s of memory; one way 450 GB/s" in out


def test_a_mesh_as_json_has_every_axis_and_rank() -> None:
    document = json.loads(run("mesh", "sglang-16", "--json").out)
    assert document["mesh"] == {"pp": 1, "dp": 2, "ep": 1, "cp": 4, "tp": 2}
    assert document["experts_over"] == ["dp", "cp", "tp"]
    assert document["ranks"][13] == {"rank": 13, "pp": 0, "dp": 1, "ep": 0, "cp": 2, "tp": 1, "expert_rank": 13}
    assert document["sglang"]["ep"] == 16
    assert document["preset"]["device"]["devices_per_node"] == 8
    assert "preset" not in json.loads(run("mesh", "tp=2", "--json").out)


def test_one_device_is_a_mesh_of_one_rank() -> None:
    assert run("mesh", "tp=1").out.splitlines()[:4] == ["tp=1: 1 rank", "", "rank  tp", "   0   0"]


def test_every_registered_strategy_is_listed() -> None:
    lines = run("strategies").out.splitlines()
    assert lines[0].split() == ["name", "sublayer", "axes", "collectives", "needs", "module"]
    assert [line.split()[:2] for line in lines[1:]] == [[s.name, s.sublayer] for s in STRATEGIES]
    assert [line.split()[-1] for line in lines[1:]] == [s.module for s in STRATEGIES], "no column is cut"
    embedding = json.loads(run("strategies", "--json").out)[0]
    assert embedding == {
        "name": "vocab_parallel",
        "sublayer": "embedding",
        "axes": ["tp"],
        "collectives": ["all_reduce", "reduce_scatter"],
        "needs": "any vocabulary (rows padded)",
        "module": "jaxpar.vocabulary.embedding",
    }
