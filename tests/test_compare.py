"""The four answers to more ranks of tp than KV heads, side by side: the figures of the ledger, and who wins where."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest
from command_line import run
from test_registry import CONFIG, LATENT

from jaxpar.assets import model_dir
from jaxpar.checkpoint import read_config
from jaxpar.errors import PlanError
from jaxpar.ledger.compare import Answer, Cost, compare_answers
from jaxpar.ledger.report import make_ledger
from jaxpar.mesh import MeshSpec
from jaxpar.plan import PHASES, Phase, Plan

GIB, MIB = 2**30, 2**20
SHALLOW = replace(CONFIG, num_hidden_layers=1, windows=(5,))
LLAMA_70B = read_config(model_dir("llama-3-70b"))


@cache
def of_70b(phase: Phase, batch: int, seq: int) -> dict[str, Cost]:
    """The costs of llama-3-70b, 8 KV heads, on 16 devices."""
    plan = Plan(MeshSpec(tp=16), dtype="bfloat16")
    answers = compare_answers(LLAMA_70B, plan, phase, batch, seq)
    assert [str(answer.plan.mesh) for answer in answers] == ["tp=16", "tp=16", "cp=2,tp=8", "dp=2,tp=8"]
    return {answer.name: cost for answer in answers if (cost := answer.cost) is not None}


@pytest.mark.parametrize("phase", PHASES)
def test_every_figure_is_that_of_the_ledger_of_the_plan(phase: Phase) -> None:
    answers = compare_answers(SHALLOW, Plan(MeshSpec(dp=2, tp=6), chunk=8), phase, 5, 19)
    assert [answer.name for answer in answers] == ["copies of heads", "inside the head", "rest to cp", "rest to dp"]
    for answer in answers:
        counted, cost = make_ledger(SHALLOW, answer.plan, phase, 5, 19), answer.cost
        assert cost is not None and answer.plan.mesh.size == 12
        assert counted.differences == []
        assert (cost.traffic, cost.flops) == (counted.traffic, sum(counted.flops.values()))
        assert (cost.memory.weight_bytes, cost.memory.cache_bytes) == (counted.weight_bytes, counted.cache_bytes)
        assert cost.memory.copied_cache_bytes == counted.copied_cache_bytes
        assert answer.to_json()["cost"]["steps"] == sum(row.steps for row in counted.traffic)


def test_copies_store_the_cache_of_llama_3_70b_twice_on_16_devices_and_the_others_once() -> None:
    costs = of_70b("decode", 64, 4096)
    once = 64 * 4096 * 2 * 80 * 8 * 128 * 2
    assert costs["copies of heads"].memory.cache_bytes * 16 == 2 * once
    assert costs["copies of heads"].memory.copied_cache_bytes == once
    for name in ("inside the head", "rest to cp", "rest to dp"):
        assert (costs[name].memory.cache_bytes * 16, costs[name].memory.copied_cache_bytes) == (once, 0)
    # What tp no longer splits is stored for every rank of cp or dp.
    weights = {name: cost.memory.weight_bytes for name, cost in costs.items()}
    assert weights["rest to cp"] == weights["rest to dp"] > 1.9 * weights["inside the head"]


def test_splitting_inside_the_head_sends_the_scores_on_top_in_two_more_calls_a_layer() -> None:
    copies, inside = (of_70b("decode", 64, 4096)[name] for name in ("copies of heads", "inside the head"))
    # 64 requests x 8 queries x 4096 keys in float32, of which a rank sends half there and half back, in 80 layers.
    assert inside.sent_bytes - copies.sent_bytes == 80 * 64 * 8 * 4096 * 4
    assert (inside.calls - copies.calls, inside.steps - copies.steps) == (160, 160)


def test_a_single_request_leaves_dp_with_a_whole_head_a_rank_and_the_fewest_steps_to_those_that_split_no_keys() -> None:
    costs = of_70b("decode", 1, 4096)
    cache = {name: cost.memory.cache_bytes for name, cost in costs.items()}
    assert cache["rest to dp"] == cache["copies of heads"] == 2 * cache["inside the head"] == 2 * cache["rest to cp"]
    steps = {name: cost.steps for name, cost in costs.items()}
    assert steps["copies of heads"] == steps["rest to dp"] < steps["rest to cp"] < steps["inside the head"]


def test_prefill_is_sent_least_with_the_rest_in_requests_and_most_with_scores_summed() -> None:
    costs = of_70b("prefill", 16, 4096)
    sent = [costs[name].sent_bytes for name in ("rest to dp", "rest to cp", "copies of heads", "inside the head")]
    assert sent == sorted(sent) and sent[3] > 2 * sent[2] > 4 * sent[0]


def test_prefill_of_a_single_prompt_is_sent_least_with_the_rest_in_cp() -> None:
    costs = of_70b("prefill", 1, 4096)
    assert min(costs, key=lambda name: costs[name].sent_bytes) == "rest to cp"


def test_what_decode_sends_of_scores_grows_with_the_context_and_nothing_else_does() -> None:
    short, long = of_70b("decode", 1, 4096), of_70b("decode", 1, 8192)
    for name in ("copies of heads", "rest to cp", "rest to dp"):
        assert short[name].sent_bytes == long[name].sent_bytes
    assert long["inside the head"].sent_bytes - short["inside the head"].sent_bytes == 80 * 8 * 4096 * 4


def test_with_experts_the_rest_goes_to_ep_and_experts_are_stored_no_more_often() -> None:
    config = read_config(model_dir("qwen3-235b-a22b"))
    assert config.moe is not None
    moe = replace(config.moe, layers=config.moe.layers[:4])
    config = replace(config, num_hidden_layers=4, windows=config.windows[:4], moe=moe)
    answers = compare_answers(config, Plan(MeshSpec(tp=8), dtype="bfloat16"), "decode", 64, 4096)
    assert [answer.name for answer in answers][3] == "rest to ep"
    assert str(answers[3].plan.mesh) == "ep=2,tp=4"
    costs = [answer.cost for answer in answers]
    assert costs[0] is not None and costs[3] is not None
    assert costs[3].memory.weight_bytes < 1.2 * costs[0].memory.weight_bytes


def refused(answers: list[Answer]) -> dict[str, str]:
    return {answer.name: answer.refused for answer in answers if answer.cost is None}


def test_an_answer_that_cannot_run_says_why_and_the_others_are_counted() -> None:
    answers = compare_answers(LLAMA_70B, Plan(MeshSpec(tp=12)), "decode", 8, 1024)
    assert [str(answer.plan.mesh) for answer in answers] == ["tp=12", "tp=12", "cp=3,tp=4", "dp=3,tp=4"]
    said = refused(answers)
    assert said.keys() == {"inside the head"}
    assert said["inside the head"].startswith("kv_split='head_dim' gives as many ranks to each of 8 KV heads, which tp")
    both = compare_answers(CONFIG, Plan(MeshSpec(cp=2, tp=6)), "decode", 8, 64)
    assert "cannot run with cp=2" in refused(both)["inside the head"]


def test_where_there_is_no_choice_one_line_says_so() -> None:
    with pytest.raises(PlanError, match=r"^tp=8 does not exceed the 8 KV heads: .* from tp=9 on; ask for tp=16$"):
        compare_answers(LLAMA_70B, Plan(MeshSpec(tp=8)), "decode", 8, 1024)
    with pytest.raises(PlanError, match=r"^a qwen3 caches latents that serve all heads: "):
        compare_answers(LATENT, Plan(MeshSpec(tp=16)), "decode", 8, 64)
    with pytest.raises(PlanError, match=r"^9999 tokens of a request are more than the model's 64 positions"):
        compare_answers(CONFIG, Plan(MeshSpec(tp=6)), "decode", 8, 9999)


# The command


def test_the_command_prints_the_answers_and_why_one_cannot_run() -> None:
    done = run("ledger", "llama-3-70b", "--mesh", "tp=12", "--batch", 16, "--compare")
    assert done.status in (0, None)
    assert "tp=12 exceeds 8 KV heads" in done.out
    assert "inside the head  tp=12      cannot run" in done.out
    assert "inside the head: kv_split='head_dim' gives as many ranks" in done.out
    assert "Least memory: " in done.out


def test_the_command_as_json_has_every_figure() -> None:
    done = run("ledger", "llama-3-70b", "--mesh", "tp=16", "--batch", 64, "--context", 4096, "--compare", "--json")
    document = json.loads(done.out)
    assert [answer["kv_split"] for answer in document] == ["replicate", "head_dim", "replicate", "replicate"]
    assert [answer["cost"]["cache_bytes"] for answer in document] == [10 * GIB, 5 * GIB, 5 * GIB, 5 * GIB]
    assert [answer["cost"]["copied_cache_bytes"] for answer in document] == [5 * GIB, 0, 0, 0]
    for answer in document:
        assert answer["refused"] is None
        assert answer["cost"]["sent_bytes"] == sum(row["sent_bytes"] for row in answer["cost"]["traffic"])


def test_the_command_ends_with_status_2_where_tp_does_not_exceed_the_heads() -> None:
    done = run("ledger", "llama-3-70b", "--mesh", "tp=4", "--compare")
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith("jaxpar: tp=4 does not exceed the 8 KV heads: ")
