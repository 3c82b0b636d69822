"""What other planners get wrong, each a thing that this one does right."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import typer
from command_line import run
from planned import config_of, found, question

from jaxpar.cli.app import app
from jaxpar.cli.generate_line import generate_arguments
from jaxpar.ledger.traffic import Traffic
from jaxpar.mesh import MeshSpec
from jaxpar.plan import Plan
from jaxpar.planner.assumptions import Assumptions
from jaxpar.planner.cluster import Cluster
from jaxpar.planner.evaluate import Evaluator
from jaxpar.planner.fits import parameters
from jaxpar.planner.network import seconds
from jaxpar.planner.search import Found
from jaxpar.planner.timing import decode_time, transfer_seconds
from jaxpar.planner.verdict import miss_of
from jaxpar.planner.weights import weights_of
from jaxpar.planner.workload import Workload
from jaxpar.registry import running
from jaxpar.runner import make_plan

ASKED = ("plan", "llama-3-70b", "--cluster", "h200-8", "--input", 4000, "--output", 500)


@pytest.fixture(scope="module")
def dense() -> Found:
    return found(ttft=0.6, tpot=0.025)


def parsed(arguments: list[str]) -> Plan:
    """The plan that `jaxpar generate` runs with these arguments."""
    group = typer.main.get_command(app)
    command = group.get_command(None, arguments[0])  # type: ignore[attr-defined]
    options = command.make_context("generate", arguments[1:]).params
    fields = {name: value for name, value in options.items() if name in Plan.__dataclass_fields__}
    mesh = MeshSpec.parse(fields.pop("mesh"))
    return make_plan(mesh, {name: value for name, value in fields.items() if value is not None})


# 1
@pytest.mark.parametrize(
    ("model", "exact"), [("llama-3-70b", 70_552_387_584), ("deepseek-v3", 671_025_404_928), ("tiny-moe", None)]
)
def test_every_weight_of_the_config_is_counted_once(model: str, exact: int | None) -> None:
    config = config_of(model)
    items = weights_of(config, Plan()).bytes(1, 1)
    matrices = sum(size for name, size in items.items() if name != "norms")
    assert parameters(config) == pytest.approx(matrices, abs=1e-6 * matrices)
    assert exact is None or matrices == pytest.approx(exact, rel=1e-6)


# 2
def test_plans_leave_the_reserve_and_show_the_largest_item(dense: Found) -> None:
    for one in dense.best:
        for pool in one.pools:
            assert not one.fits or pool.used_bytes <= 0.9 * pool.memory.device_bytes
            assert pool.memory.items[pool.memory.largest] == max(
                size for name, size in pool.memory.items.items() if name != "reserve"
            )


# 3
def test_time_to_first_token_is_queue_prefill_and_transfer_with_nothing_hidden(dense: Found) -> None:
    for one in dense.best:
        first = one.served.first
        assert one.ttft == first.queue + first.prefill + first.transfer
        steps = sum(step.seconds * times for step, times in one.prefill.steps)
        assert first.prefill == pytest.approx(steps + one.prefill.bubble)
        assert (first.transfer > 0) == one.apart
    assert {one.apart for one in dense.best} == {True, False}


def test_the_cache_of_a_70b_prompt_takes_26_ms_over_one_link() -> None:
    device, asked = Cluster.parse("h200-8").device, Workload(4000, 500)
    over_one = transfer_seconds(config_of("llama-3-70b"), Plan(dtype="bfloat16"), device, asked, Assumptions())
    assert over_one == pytest.approx(1.31072e9 / 50e9, rel=1e-3)


# 4
def test_unmet_targets_name_what_binds_and_the_plan_that_misses_least() -> None:
    missed = found(tpot=0.001)
    miss = miss_of(missed)
    assert miss is not None and miss.constraint == "TPOT" and not missed.met
    assert (miss.needed, miss.allowed) == (missed.best[0].tpot, 0.001)
    assert miss.by == min(one.miss(missed.question.targets) for one in missed.seen if one.fits)
    assert f"{miss.by:.3g} times as much" in miss.text and str(missed.best[0].plan.mesh) in miss.text


def test_more_requests_than_fit_are_told_how_many_would() -> None:
    missed = found(concurrency=100_000)
    miss = miss_of(missed)
    assert miss is not None and miss.constraint == "memory" and miss.needed > miss.allowed
    requests, mesh = missed.most
    assert miss.text.endswith(f"; {requests} requests would fit, on {mesh}")
    held = Evaluator(question(concurrency=requests)).best(Plan(MeshSpec.parse(mesh), dtype="bfloat16", chunk=2048))
    assert held is not None and held.fits and requests > 100


# 5
def test_a_sum_over_two_nodes_goes_inside_across_inside() -> None:
    device = Cluster.parse("h200-8x2").device
    message = 64 << 20
    row = Traffic("ffn", "psum", "all_reduce", ("tp",), 1, message, 2 * 15 * message // 16)
    links = device.links
    by_levels = (
        links.seconds("reduce_scatter", message, 8)
        + links.seconds("all_reduce", message // 8, 1, 2)
        + links.seconds("all_gather", message // 8, 8)
    )
    assert seconds(row, MeshSpec(tp=16), device) == pytest.approx(by_levels)


# 6
def test_context_parallel_and_pipelined_plans_are_searched_with_their_bubble() -> None:
    plans = {one.plan for one in found().seen if not one.apart}
    assert {plan.mesh.cp for plan in plans} == {plan.mesh.pp for plan in plans} == {1, 2, 4, 8}
    staged = Evaluator(question()).best(Plan(MeshSpec(pp=4, tp=2), dtype="bfloat16", chunk=2048))
    assert staged is not None and staged.prefill.bubble > 0


def test_the_line_runs_exactly_the_plan_and_every_check_passes(dense: Found) -> None:
    config = dense.question.config
    for one in dense.best:
        for pool in one.pools:
            assert parsed(generate_arguments("llama-3-70b", pool.plan, 500)) == pool.plan
            running(config, pool.plan)


# 7
def test_every_assumption_is_printed_and_can_be_set() -> None:
    out = run(*ASKED, "--explain", "tp=8", "--assume", "imbalance=1.25", "--assume", "kv_dtype=fp8").out
    printed = {line.split()[0]: line.split()[1] for line in out.partition("Assumed")[2].splitlines()[2:] if line}
    assert printed["imbalance"] == "1.25" and printed["kv_dtype"] == "fp8"
    assert {*Assumptions.names()} <= {*printed} and "None" not in printed.values()
    assert "\nIt runs with (all of it in bfloat16, without the cache in fp8 of the estimate)\n" in out


# 8
def test_any_chip_from_a_short_toml_is_planned_for(tmp_path: Path) -> None:
    chip = tmp_path / "chip.toml"
    chip.write_text(
        'description = "a chip"\n[mesh]\ntp = 4\n[device]\nkind = "chip"\nmemory_bytes = 64e9\npeak_bf16_flops = 1e14\n'
        "memory_bandwidth = 1e12\nlink_bandwidth = 1e11\ninternode_bandwidth = 1e10\ndevices_per_node = 2\n"
    )
    done = run("plan", "llama-3.1-8b", "--cluster", f"{chip}:2", "--input", 1000, "--output", 100, "--json")
    document = json.loads(done.out)
    assert done.status == 0 and document["cluster"]["device"]["kind"] == "chip"
    assert sum(pool["devices"] for pool in document["best"][0]["pools"]) == 2


# 9
REFUSED = {
    "--input -5": "input=-5: it must be a whole number of at least 1",
    "--input 200000": "200500 tokens, more than the model's 8192 positions",
    "--prefix 5000": "prefix=5000 of input=4000 tokens",
    "--cluster h200-1": "131.4 GiB a device on 1 device of h200-1",
    "--cluster h300-8": "the kinds are h100, h200",
    "--objective speed": "objective='speed' is unknown: use one of throughput, latency, cost",
    "--tpot 0": "--tpot 0: give milliseconds above 0",
    "--concurrency 0": "concurrency=0: it must be a whole number of at least 1",
    "--assume magic=1": "assume 'magic=1': write name=value",
    "--assume reserve=2": "reserve=2",
}
SCRIPT = """
import json, sys, time
from command_line import run
for extra in json.loads(sys.argv[1]):
    start = time.process_time()
    done = run("plan", "llama-3-70b", *"--cluster h200-8 --input 4000 --output 500".split(), *extra.split())
    print(json.dumps([extra, done.status, done.err, time.process_time() - start, "jax" in sys.modules]))
"""


def test_what_cannot_be_is_refused_in_one_line_before_jax_is_imported() -> None:
    command = [sys.executable, "-c", SCRIPT, json.dumps([*REFUSED])]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(REFUSED)
    for extra, status, line, took, imported in answers:
        assert status == 2 and REFUSED[extra] in line and line.count("\n") == 1
        assert took < 1 and not imported


def test_three_devices_are_three_and_never_two() -> None:
    three = found(cluster="h200-3")
    assert {one.devices for one in three.best} == {3}
    assert any(one.plan.mesh.tp == 3 for one in three.best)


# What users of other planners report.
def test_targets_steer_the_search() -> None:
    free, bound = found(), found(ttft=0.6, tpot=0.025)
    assert bound.met and bound.best[0].tpot <= 0.025 and bound.best[0].ttft <= 0.6
    assert any(one.miss(bound.question.targets) > 1 for one in bound.best)
    assert all(one.fits and one.miss(bound.question.targets) == 1 for one in bound.shown)
    assert free.best[0].tpot > 0.025
    assert free.best[0].tokens_per_device > bound.best[0].tokens_per_device
    assert found(objective="latency").best[0].latency < bound.best[0].latency


def test_layers_with_a_window_read_no_more_than_the_window() -> None:
    config, device = config_of("mistral-7b"), Cluster.parse("h200-8").device
    assert config.windows[0] == 4096
    plan = Plan(MeshSpec(tp=2), dtype="bfloat16")

    def read(tokens: int, full: bool) -> float:
        model = replace(config, windows=(None,) * config.num_hidden_layers) if full else config
        time = decode_time(model, plan, device, Workload(tokens, 2), Assumptions(), 8)
        return next(part.bytes for part in time.step.parts if part.name == "decode_attention")

    assert read(16_000, full=False) == pytest.approx(read(4_100, full=False), rel=0.02)
    assert read(16_000, full=True) > 3.5 * read(16_000, full=False)


def test_hot_experts_cost_time_and_copies_take_it_away() -> None:
    config = config_of("qwen3-235b-a22b")
    assert config.moe is not None
    loads = np.ones((config.num_hidden_layers, config.moe.num_experts))
    loads[:, 0] = 40.0
    plan = Plan(MeshSpec(ep=8), dtype="bfloat16", chunk=2048)
    even, hot = (Evaluator(question("qwen3-235b-a22b", loads=of)) for of in (None, loads))
    copied = replace(plan, expert_slots=config.moe.num_experts + 32)
    at_once = 256
    assert hot.at(plan, at_once).tpot > 1.05 * even.at(plan, at_once).tpot
    assert hot.at(copied, at_once).tpot < hot.at(plan, at_once).tpot
