"""`jaxpar verify --all`: every way to run a model, and an exit status that fails where any of them differs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from command_line import Result, run
from oracle_data import ROOT
from sample_models import write_model

from jaxpar import applicable, registry
from jaxpar.applicable import WHOLE, Way, every_way
from jaxpar.checkpoint import ModelConfig, open_checkpoint
from jaxpar.collectives.types import require_varying
from jaxpar.errors import PlanError
from jaxpar.plan import Plan
from jaxpar.registry import find, running

DENSE, EXPERTS, LATENT = "llama_9_3", "qwen3_moe", "deepseek_v3"
CASES = [(DENSE, 8), (EXPERTS, 8), (LATENT, 6), (DENSE, 7), (EXPERTS, 2)]


def config(name: str) -> ModelConfig:
    return open_checkpoint(ROOT / name).config


def named(ways: list[Way]) -> dict[str, Way]:
    return {way.name: way for way in ways}


# Which ways there are


@pytest.mark.parametrize(("model", "devices"), CASES)
def test_every_strategy_that_a_field_of_the_plan_chooses_has_a_way_that_runs_it(model: str, devices: int) -> None:
    ways = [way for way in every_way(config(model), devices, {}) if way.sublayer != WHOLE]
    experts = config(model).has_experts
    assert {(way.sublayer, way.strategy) for way in ways} == {
        (strategy.sublayer, strategy.name)
        for strategy in registry.STRATEGIES
        if strategy.axes
        and strategy.sublayer in Plan.__dataclass_fields__
        and (experts or strategy.sublayer != "moe_dispatch")
    }
    for way in ways:
        if way.plan is not None:
            strategy, steps = find(way.sublayer, way.strategy), running(config(model), way.plan).values()
            assert strategy in [step.get(way.sublayer) for step in steps]
            assert way.plan.active(strategy.axes)


@pytest.mark.parametrize(("model", "devices"), CASES)
def test_a_way_has_a_plan_for_all_devices_or_says_why_not(model: str, devices: int) -> None:
    for way in every_way(config(model), devices, {}):
        assert (way.plan is None) == bool(way.problem)
        assert way.plan is None or way.plan.mesh.size == devices


def test_every_strategy_of_inference_runs_in_some_way() -> None:
    # Eight devices are a multiple of the KV heads of mistral, which can be split inside.
    models = [config(name) for name in ("mistral", EXPERTS)]
    plans = [(model, way.plan) for model in models for way in every_way(model, 8, {}) if way.plan is not None]
    ran = {one for model, plan in plans for step in running(model, plan).values() for one in step.values()}
    of_training = ("loss", "balance", "gradient")
    assert {one for one in registry.STRATEGIES if one.axes and one.sublayer not in of_training} <= ran


def test_the_ways_that_differ_most_come_first() -> None:
    names = [way.name for way in every_way(config(EXPERTS), 8, {})]
    assert names[:5] == ["tp", "dp", "cp x tp", "experts over ep", "pp"]
    firsts = [
        names.index(f"{name}") for name in ("prefill_attention=ring", "decode_attention=ag_rs", "all_reduce=psum")
    ]
    assert max(firsts) < names.index("prefill_attention=ring_q")


def test_a_dense_model_has_no_ways_of_experts() -> None:
    names = [way.name for way in every_way(config(DENSE), 8, {})]
    assert not [name for name in names if "expert" in name or "moe" in name]
    assert len(names) == len(set(names)) > 15


def test_a_pipeline_has_as_many_stages_as_devices_and_layers_allow() -> None:
    ways = named(every_way(replace(config(DENSE), num_hidden_layers=6, windows=(None,) * 6), 12, {}))
    assert str(ways["pp"].plan and ways["pp"].plan.mesh) == "pp=6,dp=2"
    assert ways["pp x tp"].plan is not None


def test_dispatch_by_levels_has_nodes_between_and_inside_of_which_tokens_travel() -> None:
    plan = named(every_way(config(EXPERTS), 8, {}))["moe_dispatch=two_level"].plan
    assert plan is not None
    assert (str(plan.mesh), plan.experts, plan.devices_per_node) == ("dp=2,ep=4", ("dp", "ep"), 4)


def test_what_a_model_or_a_number_of_devices_does_not_allow_says_so(tmp_path: Path) -> None:
    ways = named(every_way(open_checkpoint(write_model(tmp_path)).config, 7, {}))
    assert ways["cp x tp"].problem == "7 devices cannot be split over cp and tp: their number is a prime"
    assert ways["pp"].problem.startswith("pp=7 for 1 layer")
    assert ways["prefill_attention=ulysses"].problem.startswith("prefill_attention='ulysses' needs a query head for")
    assert ways["prefill_attention=usp"].plan is not None


def test_fields_that_are_given_are_kept_where_a_way_does_not_need_others() -> None:
    given = {"layout": "zigzag", "moe_dispatch": "ragged", "experts_over": ("ep", "tp"), "chunk": 64}
    plans = {way.name: way.plan for way in every_way(config(EXPERTS), 8, given) if way.plan is not None}
    assert {(plan.layout, plan.chunk) for plan in plans.values()} == {("zigzag", 64)}
    assert {name: plan.moe_dispatch for name, plan in plans.items()} == {
        name: name.removeprefix("moe_dispatch=") if name.startswith("moe_dispatch=") else "ragged" for name in plans
    }
    assert plans["moe_dispatch=standard"].experts == ("ep", "tp")


def test_what_an_option_chooses_for_several_sublayers_is_one_plan() -> None:
    ways = named(every_way(config("mistral"), 8, {}))
    plan = ways["prefill_attention=head_dim"].plan
    assert plan == ways["decode_attention=head_dim"].plan
    assert plan is not None and (str(plan.mesh), plan.kv_split) == ("tp=8", "head_dim")


def test_a_new_strategy_has_a_way_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    new = replace(find("all_reduce", "psum"), name="new")
    monkeypatch.setattr(registry, "STRATEGIES", (*registry.STRATEGIES, new))
    plan = named(every_way(config(DENSE), 8, {}))["all_reduce=new"].plan
    assert plan is not None and (str(plan.mesh), plan.all_reduce) == ("cp=2,tp=4", "new")


def test_fields_that_no_plan_can_have_are_refused() -> None:
    with pytest.raises(PlanError, match=r"^expert_slots=8: this llama has no experts"):
        every_way(config(DENSE), 8, {"expert_slots": 8})
    with pytest.raises(PlanError, match=r"^ulysses_degree=2 is for prefill_attention='usp'"):
        every_way(config(DENSE), 8, {"ulysses_degree": 2})


# What becomes of them


@pytest.fixture(scope="module")
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as context:
        yield context


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def proved(
    patch: pytest.MonkeyPatch, model: Path, names: list[str], *options: str, **changes: dict[str, Any]
) -> Result:
    """`verify --all` of these ways alone on two devices, some strategies of attention changed."""
    changed = {
        name: replace(one, **changes[name])
        for name in changes
        for one in registry.STRATEGIES
        if one.name == name and "attention" in one.sublayer
    }
    with patch.context() as here:
        here.setattr(registry, "STRATEGIES", tuple(changed.get(one.name, one) if "attention" in one.sublayer else one
                                                   for one in registry.STRATEGIES))  # fmt: skip
        here.setattr(applicable, "every_way", lambda *given: [named(every_way(*given))[name] for name in names])
        return run("verify", model, "--all", "--devices", "2", "--max-new-tokens", "2", "--token-ids", "5,6,7",
                   "--token-ids", "8", *options)  # fmt: skip


def off(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with results that are half as much again."""
    return lambda *given, **named: jax.tree.map(lambda x: x * 1.5, function(*given, **named))


def stumbles(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("one\ntwo")


def sums_copies(*_: Any, **__: Any) -> Any:
    require_varying("sum", jnp.zeros(()), ("cp",))


def test_every_way_is_proved_whatever_becomes_of_the_others_with_bytes_and_times(
    patch: pytest.MonkeyPatch, model: Path
) -> None:
    ring = {"run": off(find("prefill_attention", "ring").run)}
    names = ["tp", "pp", *(f"prefill_attention={name}" for name in ("ring", "all_gather", "ring_q")),
             "all_reduce=psum"]  # fmt: skip
    failed = proved(patch, model, names, "--json", ring=ring, all_gather={"run": sums_copies}, ring_q={"run": stumbles})
    rows = {row["strategy"]: row for row in json.loads(failed.out)["rows"]}
    assert (failed.status, failed.err) == (1, "")
    document = json.loads(failed.out)
    assert document["counts"] == {"passed": 2, "failed": 3, "not applicable": 1, "not run": 0}
    assert (document["passed"], document["devices"], document["dtype"]) == (False, 2, "float32")
    assert {name: row["result"] for name, row in rows.items()} == {
        "tp": "passed",
        "pp": "not applicable",
        "ring": "failed",
        "all_gather": "failed",
        "ring_q": "failed",
        "psum": "passed",
    }
    assert rows["ring"]["max_difference"] > rows["ring"]["tolerance"] == 1e-4
    assert rows["ring_q"]["reason"] == "ZeroDivisionError: one"
    assert rows["pp"]["reason"].startswith("pp=2 for 1 layer")
    # A program that would sum copies has failed, and is not taken for one that the model cannot run.
    assert rows["all_gather"]["reason"].startswith(
        "PlanError: sum over cp of an array that is the same on every rank of cp"
    )
    tp = rows["tp"]
    assert 0 < tp["max_difference"] < 1e-4 and (tp["wrong_tokens"], tp["ranks"], tp["lossy"]) == (0, 2, 0)
    # Embedding, attention and FFN sum 24 numbers of 4 bytes a row, of which one of two ranks sends as many; greedy
    # sampling 16 bytes a lane in three calls. A prefill has four rows in each of two lanes.
    assert (tp["decode_calls"], tp["decode_bytes"]) == (3 + 3, 3 * 2 * 24 * 4 + 2 * 16)
    assert tp["prefill_bytes"] == 4 * 3 * 2 * 24 * 4 + 2 * 16
    assert tp["prefill_seconds"] > 0 and tp["decode_seconds"] > 0
    # A plan that two ways have runs once.
    assert {**rows["tp"], "sublayer": "all_reduce", "strategy": "psum"} == rows["psum"]


def test_a_lossy_strategy_has_a_tolerance_of_its_own_and_the_table_says_so(
    patch: pytest.MonkeyPatch, model: Path
) -> None:
    ring = {"run": off(find("prefill_attention", "ring").run), "lossy": 0.75}
    done = proved(patch, model, ["prefill_attention=ring", "dp x tp"], "--max-new-tokens", "1", ring=ring)
    lines = done.out.splitlines()
    assert (done.status, done.err) == (0, "")
    assert lines[0].split("  ")[0] == "sublayer" and "max |difference|" in lines[0]
    assert lines[1].split()[:4] == ["prefill_attention", "ring", "cp=2", "passed,"]
    assert re.search(r" passed, lossy +\d\.\d\de.\d\d of \d\.\d\de.\d\d +- +\d ", lines[1])
    assert lines[2].split()[:5] == ["model", "dp", "x", "tp", "-"]
    assert lines[4].startswith("prefill_attention=ring: tolerance ")
    assert re.search(
        r", lossy: 75% of the largest logit; tokens, which prove nothing then, differ in \d of 4 texts$", lines[4]
    )
    assert lines[5] == "dp x tp: not applicable: 2 devices cannot be split over dp and tp: their number is a prime"
    assert lines[7].startswith(
        "PASSED: on 2 devices against one in float32, 2 prompts, 1 token after each: 1 passed, 0 failed, "
        "1 not applicable, 0 not run, in "
    )


def test_where_nothing_runs_nothing_is_proved(patch: pytest.MonkeyPatch, model: Path) -> None:
    done = proved(patch, model, ["tp"], "--budget", "0", "--json")
    assert (done.status, json.loads(done.out)["passed"], json.loads(done.out)["counts"]["not run"]) == (1, False, 1)


def test_without_time_nothing_runs_and_the_last_line_says_so(model: Path) -> None:
    done = run("verify", model, "--all", "--budget", "0")
    assert (done.status, done.err) == (1, "")
    lines = done.out.splitlines()
    assert [line.split("  ")[0] for line in lines[1:3]] == ["model", "model"]
    assert lines[1].split()[2:5] == ["tp=8", "not", "run"]
    assert lines[-1].startswith("NOTHING RAN, so nothing is proved: on 8 devices against one in float32, ")
    count = sum("not run (budget)" in line for line in lines)
    assert (
        f"0 passed, 0 failed, {sum('not applicable:' in line for line in lines)} not applicable, {count} not run"
        in (lines[-1])
    )
