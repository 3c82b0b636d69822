"""`jaxpar compile` up to the compiler, which this suite does without; `make test-compile` has it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from command_line import run

from jaxpar.aot import targets
from jaxpar.aot.compile import CompiledStep, device_memory
from jaxpar.aot.every import Case, Outcome, Row, cut_card, every_case
from jaxpar.aot.memory import DeviceMemory, needed_of
from jaxpar.aot.remedy import remedy
from jaxpar.aot.sent import sent_by
from jaxpar.aot.targets import Target
from jaxpar.devices import abstract_mesh
from jaxpar.ledger.hlo import HloCollective
from jaxpar.ledger.hlo_overlap import Overlap
from jaxpar.ledger.memory import memory_of
from jaxpar.ledger.steps import make_steps
from jaxpar.mesh import MeshSpec
from jaxpar.plan import Phase, Plan
from jaxpar.program import Programs
from jaxpar.registry import STRATEGIES

V5P = Target.parse("v5p:2x2x2")
# An eighth of the model, for an eighth of the memory.
CONFIG = cut_card("llama-3-70b", [False] * 10)
GIB = 2**30


def found(
    mesh: str, phase: Phase = "decode", batch: int = 8, context: int = 1024, temporaries: int | None = None
) -> CompiledStep:
    """What `compile_step` finds for v5e before it compiles; `temporaries` are as a compiler would add them."""
    plan, target = Plan(MeshSpec.parse(mesh), dtype="bfloat16"), Target.parse("v5e:2x4")
    step = make_steps(CONFIG, plan, phase, batch, context)[0]
    programs = Programs(CONFIG, plan, abstract_mesh(plan.mesh))
    _, memory = device_memory(programs, target, step, batch, context)
    memory = replace(memory, temporaries=temporaries)
    return CompiledStep(target, plan, phase, batch, context, [(1, step)], step, memory, {}, {}, [], [], None, 0.0)


def advice(one: CompiledStep) -> str:
    assert not one.fits
    return remedy(one, CONFIG)


# Memory


def test_weights_and_cache_are_those_of_the_ledger_and_inputs_are_what_is_left_of_the_arguments() -> None:
    one = found("tp=8")
    held = memory_of(Programs(CONFIG, one.plan, abstract_mesh(one.plan.mesh)), "decode", 8, 1024)
    assert (one.memory.weights, one.memory.cache) == (held.weight_bytes, held.cache_bytes)
    # Of each of 8 lanes: token, position, 64 pages, start, last; 5 options. And the positions of the pool.
    assert one.memory.inputs == 8 * 4 * (1 + 1 + 64 + 1 + 1 + 5) + held.pages * 16 * 4


def test_a_step_fits_up_to_the_last_byte() -> None:
    full = DeviceMemory(capacity=100, weights=60, cache=20, inputs=1, padding=2, temporaries=10, outputs=3, code=4)
    assert (full.total, full.fits) == (100, True)
    over = replace(full, temporaries=11)
    assert (over.total, over.fits) == (101, False)


@pytest.mark.parametrize(
    ("weights", "cache", "temporaries", "largest"), [(5, 3, 1, "weights"), (3, 5, 1, "cache"), (3, 4, 5, "temporaries")]
)
def test_the_largest_item_is_named(weights: int, cache: int, temporaries: int, largest: str) -> None:
    assert DeviceMemory(9, weights, cache, 0, temporaries=temporaries).largest == largest


@pytest.mark.parametrize("prefix", ["", "E1000: CompileTimeHbmOom: "], ids=["JAX 0.10", "JAX 0.12"])
def test_the_compiler_s_word_on_a_program_that_does_not_fit_is_read(prefix: str) -> None:
    said = "the total memory required for HLO temporaries (167.66G) exceeds available HBM (15.75G)."
    assert needed_of(f"RESOURCE_EXHAUSTED: {prefix}Ran out of memory on HBM, {said}") == int(167.66 * GIB)
    assert needed_of(f"INTERNAL: {said}") is None
    assert needed_of("RESOURCE_EXHAUSTED: too many files") is None


# Remedies


def test_weights_that_do_not_fit_are_spread_over_as_many_ranks_as_it_takes() -> None:
    said = advice(found("tp=1"))
    assert "TPU v5e has 14.9 GiB" in said and "most of it weights, 19.85 GiB" in said
    assert said.endswith(": --mesh tp=2 takes 10.08 GiB a device")


def test_replicas_give_their_devices_to_weights_before_more_devices_are_asked_for() -> None:
    assert advice(found("dp=8")).endswith(": --mesh dp=4,tp=2 takes 9.965 GiB a device")


def test_a_target_that_is_too_small_for_the_remedy_is_named() -> None:
    said = advice(replace(found("tp=1"), target=Target.parse("v5e:1x1")))
    assert said.endswith(": --mesh tp=2 takes 10.08 GiB a device, on 2 devices, and the target has 1")


def test_a_cache_that_does_not_fit_says_the_batch_that_does() -> None:
    said = advice(found("tp=8", batch=1024, context=8192))
    batch = int(said.partition("--batch ")[2].split()[0])
    assert found("tp=8", batch=batch, context=8192).fits
    assert not found("tp=8", batch=batch + 32, context=8192).fits


@pytest.mark.parametrize("mesh", ["tp=8", "cp=2,tp=4"])
def test_temporaries_that_do_not_fit_say_the_chunk_that_does(mesh: str) -> None:
    said = advice(found(mesh, "prefill", batch=1, temporaries=16 * GIB))
    assert "most of it temporaries, 16" in said and "--chunk 256 takes about 8 GiB" in said


# Collectives


def collective(overlap: Overlap | None, calls: int = 1) -> HloCollective:
    return HloCollective(
        "all_reduce", ("tp",), ((0, 1, 2, 3), (4, 5, 6, 7)), 2**20, calls, "", "ffn", "psum", False, overlap
    )


@pytest.mark.parametrize(
    ("overlap", "hidden"),
    [
        (None, "exposed"),
        (Overlap(), "exposed"),
        (Overlap(others=1, bytes=8), "exposed"),
        (Overlap(products=1, flops=10**9), "partly"),
        (Overlap(products=1, flops=10**10), "hidden"),
        (Overlap(others=1, bytes=10**8), "hidden"),
    ],
)
def test_a_collective_is_hidden_by_work_that_takes_as_long(overlap: Overlap | None, hidden: str) -> None:
    # Over four ranks of a ring 1 MiB takes 4 hops of 1 us and 1.5 MiB at 600 GB/s: 6.6 us.
    (row,) = sent_by([collective(overlap)], Plan(MeshSpec(dp=2, tp=4)), V5P.kind)
    assert row.wire_seconds == pytest.approx(4e-6 + 1.5 * 2**20 / 600e9)
    assert row.hidden == hidden


def test_like_calls_are_one_row_and_those_over_one_rank_none() -> None:
    alone = replace(collective(None), axes=(), groups=((0,), (1,)))
    (row,) = sent_by([collective(None), collective(None, calls=2), alone], Plan(MeshSpec(dp=2, tp=4)), V5P.kind)
    assert (row.calls, row.sent_bytes) == (3, 3 * 3 * 2**19)


# The command


def refusal(*arguments: object) -> str:
    done = run("compile", *arguments)
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1), done
    return done.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "compile needs a MODEL and one --target"),
        (["tiny"], "compile needs a MODEL and one --target"),
        (["tiny", "--all"], "MODEL 'tiny' and --all: give one of them"),
        (["tiny", "--target", "v5p"], "target 'v5p': '' is no shape"),
        (["tiny", "--target", "v5e:2x2", "--mesh", "tp=8"], "mesh tp=8 needs 8 devices and target v5e:2x2 has 4"),
        (["tiny", "--target", "v5e:2x2", "--phase", "train"], "phase='train' is unknown"),
        (["tiny", "--target", "v5e:2x2", "--batch", "0"], "batch=0: it must be at least 1"),
        (["tiny", "--target", "v5e:2x2", "--context", "99999"], "99999 tokens of a request are more than"),
        (["tiny", "--target", "v5e:2x2", "--mesh", "cp=2", "--prefill-attention", "star"], "is not a strategy"),
    ],
)
def test_a_step_that_cannot_be_is_refused_before_a_compiler_is_asked(arguments: list[str], said: str) -> None:
    assert said in refusal(*arguments)


def test_without_the_compiler_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise targets.PackageNotFoundError(name)

    monkeypatch.setattr(targets, "version", absent)
    assert "pip install 'jaxpar[tpu]'" in refusal("tiny", "--target", "v5e:2x2")
    assert "pip install 'jaxpar[gpu-compile]'" in refusal("tiny", "--target", "h100:1x1x8")


# Every strategy


def test_every_registered_strategy_has_a_program_that_runs_it() -> None:
    cases = every_case()
    assert [case.strategy for case in cases] == list(STRATEGIES)
    assert [case.strategy.name for case in cases if case.plan is None] == []


def test_a_sum_by_levels_is_shown_in_the_phase_in_which_it_has_two() -> None:
    shown = {(case.strategy.sublayer, case.strategy.name): case.work for case in every_case()}
    assert shown["all_reduce", "two_level"] == "decode" and shown["all_reduce", "psum"] == "prefill"


@pytest.mark.parametrize(
    ("outcomes", "proved"),
    [({"a": Outcome(True)}, True), ({"a": Outcome(True), "b": Outcome(False, reason="no")}, False), ({}, False)],
)
def test_a_strategy_is_proved_where_it_compiles_for_every_target(outcomes: dict[str, Outcome], proved: bool) -> None:
    case = Case(STRATEGIES[0], "-", "prefill", None, "no plan of applicable.py chooses it")
    assert Row(case, outcomes).proved == proved
