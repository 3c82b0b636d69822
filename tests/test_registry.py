"""Every registered strategy is counted: what its closed form predicts is what the programs hold, on any mesh.

Programs are only traced, on abstract meshes: 64 ranks need no device.
"""

from __future__ import annotations

import inspect
import itertools
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import pytest
from every_plan import CHOICES, every_program
from registry_models import CONFIG, LATENT, LAYERS
from uniform import uniform_control_violations

from jaxpar.checkpoint.config import ModelConfig
from jaxpar.devices import abstract_mesh
from jaxpar.errors import PlanError
from jaxpar.ledger.flops import trace_flops
from jaxpar.ledger.predict import predict_flops, predict_traffic
from jaxpar.ledger.trace import count_collectives, trace_traffic
from jaxpar.ledger.traffic import Traffic, compare
from jaxpar.mesh import AXES, MeshSpec
from jaxpar.plan import PHASES, Phase, Plan
from jaxpar.program import Programs
from jaxpar.registry import STRATEGIES, chosen, find
from jaxpar.strategies import Step, Strategy

MESHES = ["tp=1", "dp=8", "tp=3", "dp=2,tp=4", "dp=4,ep=2,tp=8"]
CP_MESHES = ["cp=3,tp=2", "dp=2,cp=2,tp=2", "dp=2,cp=4,tp=8"]
# Three layers: of two stages the second has an empty slot, of three each has one with a window of its own.
PP_MESHES = ["pp=2,dp=2,tp=2", "pp=3,cp=2,tp=2"]
KINDS: dict[str, dict[str, bool]] = {"greedy": {}, "sampled": {"sampled": True}, "logits": {"logits": True}}
# Nine query heads over tp 8 leave two on a rank, which four ranks of cp cannot share by Ulysses.
HALVES = ("one_shot", "two_shot", "tree", "two_level")
REFUSED = [("dp=2,cp=4,tp=8", "prefill_attention=ulysses")]
# Twice as many ranks of tp as KV heads, of interest to what splits those alone.
INSIDE = [program for program in every_program("dp=2,tp=6") if program[1] == "head_dim"]
PROGRAMS = [
    pytest.param(mesh, choice, phase, kind, id=f"{mesh}-{choice}-{phase}-{kind}")
    for mesh, choice, phase in [*every_program(*MESHES, *CP_MESHES), *INSIDE]
    for kind in KINDS
    # How attention runs is nothing to the head and to sampling, where the residual stream lies is.
    if (mesh, choice) not in REFUSED
    and (
        kind == "greedy"
        or choice == "default"
        or (choice.startswith("sequence_parallel") and "all_reduce" not in CHOICES[choice])
    )
]
IN_16_BITS = [
    pytest.param(*program.values, dtype, id=f"{program.id}-{dtype}")
    for program in PROGRAMS
    for dtype in ("bfloat16", "float16")
    if program.values[0] in ("dp=2,tp=4", "dp=2,cp=2,tp=2") and (dtype == "bfloat16" or program.values[1] == "default")
]
# Codes have a size of their own; the embedding and the head send values.
CODES = ("all_reduce=int8", "all_reduce=fp8", "sequence_parallel,int8")
OF_LATENTS = every_program("tp=3", "cp=3,tp=2", "dp=2,cp=4,tp=2")
PROGRAMS += [
    pytest.param(mesh, choice, phase, kind, id=f"{mesh}-{choice}-{phase}-{kind}")
    for mesh, (choice, kind) in itertools.product(
        PP_MESHES, [*(("default", kind) for kind in KINDS), ("sequence_parallel", "greedy")]
    )
    for phase in PHASES
]
ALONE = [program for program in PROGRAMS if program.values[0] in ("tp=1", "dp=8")]


def a_step(
    mesh: str, phase: Phase, kind: str, choice: str = "default", config: ModelConfig = CONFIG, **fields: Any
) -> Step:
    plan = Plan(MeshSpec.parse(mesh), page_size=4, **{**CHOICES[choice], **fields})
    return Step(config, plan, phase, lanes=2, tokens=1 if phase == "decode" else 5, keys=12, **KINDS[kind])


@cache
def jaxpr(step: Step) -> jax.extend.core.ClosedJaxpr:
    programs = Programs(step.config, step.plan, abstract_mesh(step.plan.mesh))
    program = programs.spmd(step.phase, step.logits, step.sampled, step.room)
    return jax.make_jaxpr(program)(*programs.abstract_arguments(step, pages=8))


def traced(step: Step) -> list[Traffic]:
    return trace_traffic(jaxpr(step), step.plan.mesh.sizes)


@pytest.mark.parametrize(("mesh", "choice", "phase", "kind"), PROGRAMS)
def test_predicted_bytes_calls_and_flops_are_the_traced_ones_and_no_collective_stands_where_ranks_may_part_ways(
    mesh: str, choice: str, phase: Phase, kind: str
) -> None:
    step = a_step(mesh, phase, kind, choice)
    assert compare(predict_traffic(step), traced(step)) == []
    flops = {row.name: row.flops for row in trace_flops(jaxpr(step))}
    assert flops == predict_flops(step)
    assert uniform_control_violations(jaxpr(step), step.plan.mesh.sizes) == []


@pytest.mark.parametrize(("mesh", "choice", "phase"), OF_LATENTS)
def test_predicted_bytes_calls_and_flops_of_latent_attention_are_the_traced_ones(
    mesh: str, choice: str, phase: Phase
) -> None:
    step = a_step(mesh, phase, "greedy", choice, config=LATENT, dtype="bfloat16")
    assert compare(predict_traffic(step), traced(step)) == []
    assert {row.sublayer: row.flops for row in trace_flops(jaxpr(step))} == predict_flops(step)
    assert uniform_control_violations(jaxpr(step), step.plan.mesh.sizes) == []


@pytest.mark.parametrize("mesh", ["dp=2,tp=4", "pp=2,dp=2,tp=2"])
def test_predicted_flops_of_decode_on_pages_of_whole_tiles_are_the_traced_ones(mesh: str) -> None:
    config = replace(CONFIG, head_dim=128, windows=(None,) * LAYERS, sinks=False)
    plan = Plan(MeshSpec.parse(mesh), page_size=16, dtype="bfloat16")
    step = Step(config, plan, "decode", lanes=2, tokens=1, keys=32)
    assert {row.name: row.flops for row in trace_flops(jaxpr(step))} == predict_flops(step)
    assert uniform_control_violations(jaxpr(step), step.plan.mesh.sizes) == []
    assert "name=_paged_attention" in str(jaxpr(step))


def test_what_travels_of_latent_attention_is_the_latent_and_the_rotated_key_once_for_all_heads() -> None:
    step = a_step("cp=3,tp=2", "prefill", "greedy", config=LATENT, prefill_attention="ring")
    hops = [row for row in traced(step) if row.collective == "ppermute"]
    # Two lanes of twelve keys, two hops, float32.
    assert [(row.calls, row.message_bytes) for row in hops] == [(2, 2 * 12 * 12 * 4), (2, 2 * 12 * 4 * 4)]


@pytest.mark.parametrize(("mesh", "choice", "phase", "kind", "dtype"), IN_16_BITS)
def test_predicted_bytes_and_calls_are_the_traced_ones_in_every_dtype(
    mesh: str, choice: str, phase: Phase, kind: str, dtype: str
) -> None:
    step = a_step(mesh, phase, kind, choice, dtype=dtype)
    assert compare(predict_traffic(step), traced(step)) == []
    half, full = (
        sum(row.sent_bytes for row in traced(one) if row.sublayer in ("embedding", "attention", "ffn", "head"))
        for one in (step, a_step(mesh, phase, kind, choice))
    )
    if choice in CODES:
        assert half < full
    else:
        assert 2 * half == full


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("mesh", MESHES)
def test_a_layer_holds_exactly_two_all_reduces_and_only_the_embedding_and_sampling_add_to_them(
    mesh: str, phase: Phase, kind: str
) -> None:
    step = a_step(mesh, phase, kind)
    calls: dict[str, int] = {}
    for row in traced(step):
        assert (row.collective, row.axes, row.per) == ("all_reduce", ("tp",), "")
        calls[row.sublayer] = calls.get(row.sublayer, 0) + row.calls
    if step.plan.mesh.tp == 1:
        assert calls == {}
    else:
        sampling = {"greedy": {"sampling": 3}, "sampled": {"sampling": 3 + 2 + 2 * 8}, "logits": {}}
        assert calls == {"embedding": 1, "attention": LAYERS, "ffn": LAYERS, **sampling[kind]}


@pytest.mark.parametrize("tokens", [1, 2, 3, 8])
def test_sequence_parallelism_sends_what_the_all_reduces_send_of_as_many_rows(tokens: int) -> None:
    # Rows are filled up to a multiple of tp; the head adds one sum of the two last tokens.
    whole, split = (
        replace(a_step("dp=2,tp=4", "prefill", "greedy", choice), tokens=rows)
        for choice, rows in (("default", -(-tokens // 2) * 2), ("sequence_parallel", tokens))
    )
    layers = [sum(row.sent_bytes for row in traced(step) if row.sublayer in ("attention", "ffn"))
              for step in (whole, split)]  # fmt: skip
    assert layers[0] == layers[1]
    assert {row.collective for row in traced(split) if row.sublayer in ("attention", "ffn")} == {
        "all_gather",
        "reduce_scatter",
    }


def test_sampling_sends_counts_and_never_the_vocabulary() -> None:
    # Two lanes: two maxima and two sums of [2], one sum of [2, 2], and 16 rounds of [2, 15], float32, over 4 ranks.
    sent = sum(row.sent_bytes for row in traced(a_step("dp=2,tp=4", "decode", "sampled")) if row.sublayer == "sampling")
    assert sent == (4 * 8 + 16 + 16 * 120) * 2 * 3 // 4


@pytest.mark.parametrize(("mesh", "choice", "phase", "kind"), ALONE)
def test_one_device_and_replicas_alone_hold_no_collective_at_all(
    mesh: str, choice: str, phase: Phase, kind: str
) -> None:
    assert count_collectives(jaxpr(a_step(mesh, phase, kind, choice))) == 0


# The table itself


def test_a_name_is_unique_within_its_sublayer() -> None:
    assert len({(strategy.sublayer, strategy.name) for strategy in STRATEGIES}) == len(STRATEGIES)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: f"{strategy.sublayer}:{strategy.name}")
def test_a_strategy_is_a_module_with_the_function_its_closed_form_and_its_check(strategy: Strategy) -> None:
    module: Any = inspect.getmodule(strategy.traffic)
    assert strategy.module == module.__name__
    assert module.__doc__.startswith(f"`{strategy.name}`")
    assert (strategy.traffic, strategy.check) == (module.traffic, module.check)
    assert set(strategy.axes) <= set(AXES)
    assert bool(strategy.axes) == bool(strategy.collectives)


# Dispatch to experts: test_expert_ledger.py; their balance: test_train_experts.py.
@pytest.mark.parametrize(
    "strategy",
    [strategy for strategy in STRATEGIES if strategy.sublayer not in ("moe_dispatch", "balance")],
    ids=lambda strategy: f"{strategy.sublayer}:{strategy.name}",
)
def test_a_strategy_sends_by_the_collectives_and_over_the_axes_that_it_names(strategy: Strategy) -> None:
    steps = [
        a_step(mesh, phase, kind, choice) for mesh, choice, phase, kind in (program.values for program in PROGRAMS)
    ]
    # Where the residual stream is split, sums are halves.
    steps += [
        replace(step, plan=replace(step.plan, sequence_parallel=True)) for step in steps if strategy.name in HALVES
    ]
    rows = [row for step in steps if runs(strategy, step) for row in strategy.traffic(step)]
    assert {row.collective for row in rows} == set(strategy.collectives)
    assert {axis for row in rows for axis in row.axes} == (set(strategy.axes) if rows else set())


def runs(strategy: Strategy, step: Step) -> bool:
    """Whether the step runs the strategy; those of training are in no plan, and run without cp and pp."""
    of_training = strategy.sublayer in ("loss", "balance", "gradient")
    in_training = of_training and step.plan.mesh.cp == step.plan.mesh.pp == 1
    return in_training or strategy in chosen(step).values()


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: f"{strategy.sublayer}:{strategy.name}")
def test_no_strategy_sends_anything_on_one_device(strategy: Strategy) -> None:
    for phase in PHASES:
        step = a_step("tp=1", phase, "sampled")
        assert not runs(strategy, step) or strategy.traffic(step) == []


def test_a_step_runs_the_strategies_that_its_plan_names_in_the_order_of_the_forward_pass() -> None:
    for phase in PHASES:
        for mesh, passes_on in (("dp=2,tp=4", []), ("pp=2,dp=2,tp=2", ["pipeline"])):
            assert list(chosen(a_step(mesh, phase, "greedy"))) == [
                "embedding",
                f"{phase}_attention",
                "all_reduce",
                *passes_on,
                "head",
                "sampling",
            ]


def test_an_unknown_strategy_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(
        PlanError, match=r"^all_reduce='mesh' is not a strategy: use auto, fixed_order, fp8, int8, one_s"
    ):
        find("all_reduce", "mesh")
    with pytest.raises(
        PlanError, match=r"^prefill_attention='flat' is not a strategy: use all_gather, auto, head_dim, local, ri"
    ):
        chosen(Step(CONFIG, Plan(prefill_attention="flat"), "prefill", lanes=2, tokens=5, keys=12))


def test_a_strategy_refuses_a_step_that_it_cannot_run_with_the_reason() -> None:
    local = Step(CONFIG, Plan(MeshSpec(cp=2), decode_attention="local"), "decode", lanes=2, tokens=1, keys=12)
    with pytest.raises(PlanError, match=r"^attention 'local' sees the keys of its own rank only, and cp=2 splits them"):
        chosen(local)
    mesh, choice = REFUSED[0]
    with pytest.raises(
        PlanError, match=r"^prefill_attention='ulysses' needs a query head for each of cp=4 ranks, and "
    ):
        chosen(a_step(mesh, "prefill", "greedy", choice))
    for degree, said in (
        (3, "ulysses_degree=3 does not divide cp=4"),
        (4, "ulysses_degree=4 is more than the 2 query"),
    ):
        plan = Plan(MeshSpec(cp=4, tp=8), prefill_attention="usp", ulysses_degree=degree)
        with pytest.raises(PlanError, match=f"^{said}"):
            chosen(Step(CONFIG, plan, "prefill", lanes=2, tokens=5, keys=12))


def test_auto_moves_the_keys_of_a_first_chunk_and_the_queries_of_a_short_one_after_a_long_prefix() -> None:
    plan = Plan(MeshSpec(cp=4))
    assert chosen(Step(CONFIG, plan, "prefill", lanes=1, tokens=64, keys=64))["prefill_attention"].name == "ring"
    assert chosen(Step(CONFIG, plan, "prefill", lanes=1, tokens=8, keys=4096))["prefill_attention"].name == "ring_q"
    assert chosen(Step(CONFIG, plan, "decode", lanes=1, tokens=1, keys=64))["decode_attention"].name == "q_replicated"
