"""`jaxpar plan`: its tables, its JSON, its picture and its exit status."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import run
from matplotlib import image
from planned import config_of, question

from jaxpar.aot.memory import DeviceMemory as CompiledMemory
from jaxpar.aot.targets import Target
from jaxpar.checkpoint.config import ModelConfig
from jaxpar.cli.generate_line import generate_line
from jaxpar.errors import PlanError
from jaxpar.ledger.steps import make_steps
from jaxpar.links import Links
from jaxpar.mesh import MeshSpec
from jaxpar.plan import Phase, Plan
from jaxpar.planner import check
from jaxpar.planner.assumptions import Assumptions
from jaxpar.planner.evaluate import Evaluator
from jaxpar.planner.fits import parameters

ASKED = ("plan", "llama-3.1-8b", "--cluster", "h200-2", "--input", 1000, "--output", 100)


def test_it_shows_plans_times_memory_limits_assumptions_and_the_line_to_run() -> None:
    done = run(*ASKED, "--top", 3)
    assert (done.status, done.err) == (0, "")
    for title in ("Best plans", "Where the time goes", "Memory of the fullest", "Why it is not larger", "Assumed"):
        assert f"\n{title}" in done.out
    assert "tokens in, 100 out; throughput" in done.out and "jaxpar generate llama-3.1-8b --mesh" in done.out
    limits = done.out.partition("Why it is not larger\n")[2].partition("\n\n")[0].splitlines()
    for axis in ("pp", "tp"):
        assert any(f"{axis}=" in line.split(":")[0] for line in limits)


def test_json_has_the_search_and_the_front(tmp_path: Path) -> None:
    png = tmp_path / "front.png"
    done = run(*ASKED, "--json", "--plot", png, "--ttft", 500, "--tpot", 50)
    document = json.loads(done.out)
    assert done.status == 0 and document["met"] and document["miss"] is None
    best = document["best"][0]
    assert best["ttft"] == sum(best["ttft_parts"].values()) <= 0.5 and best["tpot"] <= 0.05
    assert all(line.startswith("jaxpar generate llama-3.1-8b") for line in best["generate"])
    assumed = document["assumptions"]
    assert assumed["overlap"] == 0.8 and assumed["weight_dtype"] == "bfloat16" and 0 < assumed["memory_efficiency"] < 1
    front = [(one["tokens_per_second_per_user"], one["tokens_per_second_per_device"]) for one in document["front"]]
    assert front == sorted(front, key=lambda point: (-point[0], point[1])) and len(front) > 3
    assert image.imread(png).shape[2] in (3, 4)


def test_a_target_that_nothing_meets_ends_with_status_1() -> None:
    done = run(*ASKED, "--tpot", 0.01)
    assert done.status == 1 and done.err == ""
    assert "no plan meets all targets, and TPOT binds: the nearest" in done.out


@pytest.mark.parametrize("plan", ["2", "tp=2 chunk=1024 sequence_parallel=true"])
def test_a_plan_is_explained_by_number_or_as_it_is_written(plan: str) -> None:
    done = run(*ASKED, "--explain", plan)
    assert done.status == 0 and "The roofline of each sublayer" in done.out
    if plan != "2":
        assert "--mesh tp=2 --dtype bfloat16 --sequence-parallel --chunk 1024" in done.out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--explain", "tp=4"], "mesh tp=4 has 4 devices and h200-2 has 2"),
        (["--explain", "tp=2 speed=3"], "'speed=3' is neither a mesh nor field=value of a plan"),
        (["--explain", "99"], "--explain 99: there are"),
        (["--explain", ""], "the plan is empty"),
        (["--check", "-1"], "--check -1"),
        (["--top", "0"], "--top 0"),
        (["--moe-stats", "absent.json"], "absent.json cannot be read"),
    ],
)
def test_what_cannot_be_explained_is_refused(options: list[str], said: str) -> None:
    done = run(*ASKED, *options)
    assert done.status == 2 and said in done.err and done.out == ""


def test_loads_of_experts_are_those_of_the_model(tmp_path: Path) -> None:
    loads = tmp_path / "loads.json"
    loads.write_text("[[1, 2, 3]]")
    done = run("plan", "tiny-moe", "--cluster", "h200-2", "--input", 20, "--output", 4, "--moe-stats", loads)
    assert done.status == 2 and "loads are of 1 layer and 3 experts" in done.err


def test_links_have_no_option_and_no_line() -> None:
    with pytest.raises(PlanError, match="links come from a mesh preset"):
        generate_line("tiny", Plan(MeshSpec(tp=2), links=Links(1e9, 1e-6, 1e9, 1e-6)), 4)


def test_a_model_of_8b_has_8b_parameters() -> None:
    assert parameters(config_of("llama-3.1-8b")) == pytest.approx(8.03e9, rel=1e-3)


def test_a_cpu_keeps_nothing_of_a_small_memory_for_a_runtime() -> None:
    done = run("plan", "tiny", "--cluster", "laptop-8", "--input", 8, "--output", 8)
    assert done.status == 0 and "jaxpar generate tiny --mesh " in done.out


def test_a_compiled_plan_is_held_against_its_own_dtype_whatever_is_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(config: ModelConfig, plan: Plan, target: Target, phase: Phase, batch: int, context: int) -> Any:
        step, memory = make_steps(config, plan, phase, batch, context)[0], CompiledMemory(9, 1, 1, 1, temporaries=1)
        return SimpleNamespace(step=step, memory=memory, compiled=False, fits=True, compile_seconds=0.0)

    monkeypatch.setattr(check, "compile_step", compiled)

    def predicted(assumed: Assumptions) -> list[tuple[int, int]]:
        asked = question(concurrency=8, assumed=assumed)
        one = Evaluator(asked).at(Plan(MeshSpec(tp=8), dtype="bfloat16", chunk=4096), 8)
        rows = [row.pairs for row in check.check(asked, Target.parse("h200:1x1x8"), [one])]
        return [(pairs["weights"].predicted, pairs["cache"].predicted) for pairs in rows]

    assert predicted(Assumptions(weight_dtype="fp8", kv_dtype="fp8")) == predicted(Assumptions())
