"""Layers over stages give what transformers computes, for any stages, groups and chunks; what is idle and what hops."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from oracle_checks import assert_logits, assert_tokens, checked_loads
from oracle_data import EXPERT_ORACLES, ORACLES, ROOT, load_oracle
from sample_models import open_session, oracle_runner

import jaxpar
from jaxpar import verify_all
from jaxpar.collectives import varying_axes
from jaxpar.devices import abstract_mesh
from jaxpar.engine.session import Decoded
from jaxpar.errors import PlanError
from jaxpar.ledger.report import make_ledger
from jaxpar.ledger.scope import scope_of
from jaxpar.ledger.walk import equations, inner_jaxprs, scopes_of
from jaxpar.mesh import MeshSpec
from jaxpar.pipeline.timetable import decode_timetable, prefill_timetable
from jaxpar.plan import PHASES, Phase, Plan
from jaxpar.program import Programs, StepOutput
from jaxpar.strategies import Step
from jaxpar.verify import verify

pytestmark = pytest.mark.usefixtures("unwritten_pages_are_nan")
Record = Callable[[str, object], None]
MESHES = [
    "pp=2",
    "pp=3",
    "pp=4",
    *(f"pp={pp},{axis}=2" for pp in (2, 3, 4) for axis in ("dp", "ep", "cp", "tp")),
    "pp=2,cp=2,tp=2",
    "pp=2,dp=2,tp=2",
]
PRODUCT = [
    (name, mesh)
    for name, mesh in itertools.product([*ORACLES, *EXPERT_ORACLES], MESHES)
    if MeshSpec.parse(mesh).pp <= 2 + (name in ("gpt_oss", "deepseek_v3", "qwen3", "qwen3_bf16", "mistral_bf16"))
    + 2 * (name in ("qwen2_sliding", "qwen3_moe_dense"))
]  # fmt: skip
# 2, 3 and 4 stages with each other axis; 2, 3 and 4 layers, which the stages seldom divide; windows, sinks, tied and
# untied vocabularies, dense layers beside layers with experts, latents.
CHOICE: list[tuple[str, str, dict[str, Any]]] = [
    ("qwen2_sliding", "pp=3,tp=2", {"stages": "1,1,2"}),
    ("gpt_oss", "pp=2,ep=2,tp=2", {"moe_dispatch": "all_to_all", "stages": "1,2"}),
    ("deepseek_v3", "pp=2,dp=2,tp=2", {}),
    ("llama_9_3", "pp=2,cp=2,tp=2", {"chunk": 8, "sequence_parallel": True}),
    ("qwen2_sliding", "pp=4,dp=2", {"chunk": 8, "stages": "balanced"}),
]
MORE: list[tuple[str, str, dict[str, Any]]] = [
    ("qwen3", "pp=2", {"microbatches": 3}),
    ("qwen3_moe_dense", "pp=4,ep=2", {"chunk": 5, "moe_dispatch": "standard"}),
    ("deepseek_v3", "pp=3,cp=2", {"experts_over": "cp", "decode_attention": "helix", "chunk": 7}),
    ("qwen3_moe", "pp=2,ep=2,tp=2", {"experts_over": "ep,tp", "sequence_parallel": True}),
    ("llama_9_3", "pp=2,tp=4", {"sequence_parallel": True, "collective_matmul": True}),
    ("llama_mqa", "pp=2,tp=2", {"kv_split": "head_dim"}),
    ("qwen3", "pp=2,tp=4", {"all_reduce": "ring"}),
    ("mistral", "pp=2,dp=2,cp=2", {"prefill_attention": "ring", "layout": "zigzag", "chunk": 6}),
]


def assert_is_the_oracle(name: str, mesh: str, record_property: Record | None = None, **plan: Any) -> None:
    oracle, runner = load_oracle(name), oracle_runner(name, mesh, **{"page_size": 5, **plan})
    assert oracle.margin > 0.01
    if record_property is not None:
        record_property("margin", oracle.margin)
    assert_logits(runner, oracle.prompts, oracle.logits)
    assert_tokens(runner, oracle.prompts, oracle.greedy)
    if runner.config.moe is not None:
        checked_loads(runner, oracle.prompts, oracle.greedy)


@pytest.mark.parametrize(("name", "mesh", "plan"), CHOICE)
def test_the_last_stage_has_the_logits_and_tokens_of_transformers(
    name: str, mesh: str, plan: dict[str, Any], record_property: Record
) -> None:
    assert_is_the_oracle(name, mesh, record_property, **plan)


@pytest.mark.full
@pytest.mark.parametrize(("name", "mesh", "plan"), MORE)
def test_stages_go_together_with_every_other_way(name: str, mesh: str, plan: dict[str, Any]) -> None:
    assert_is_the_oracle(name, mesh, **plan)


@pytest.mark.full
@pytest.mark.parametrize(("name", "mesh"), PRODUCT)
def test_the_last_stage_has_the_logits_and_tokens_of_transformers_on_all_meshes(name: str, mesh: str) -> None:
    assert_is_the_oracle(name, mesh)


@pytest.mark.parametrize("microbatches", [1, 3, *(pytest.param(groups, marks=pytest.mark.full) for groups in (2, 5))])
def test_any_number_of_groups_in_rotation_generates_the_same_tokens(microbatches: int) -> None:
    oracle = load_oracle("llama_9_3")
    runner = oracle_runner("llama_9_3", "pp=2", microbatches=microbatches)
    made = runner.generate(oracle.prompts, max_new_tokens=len(oracle.greedy[0]), ignore_eos=True)
    assert [completion.token_ids for completion in made] == oracle.greedy


def test_requests_that_end_at_different_times_leave_the_others_as_they_are() -> None:
    oracle, runner = load_oracle("llama_9_3"), oracle_runner("llama_9_3", "pp=2", microbatches=3)
    session, wanted = open_session(runner, oracle.prompts, len(oracle.greedy[0])), [len(row) for row in oracle.greedy]
    # The first three are in different groups; the second is alone in its own from its second token on.
    wanted[:3] = 1, 2, 4
    tokens: list[list[int]] = [[] for _ in oracle.prompts]
    latest: dict[int, int] = {}

    def keep(decoded: Decoded) -> None:
        for request, token in decoded.tokens.items():
            tokens[request].append(token)
            if len(tokens[request]) < wanted[request]:
                latest[request] = token

    for chunk in session.prefill():
        keep(chunk.decoded)
    while latest or not session.pipe.is_empty:
        for decoded in session.turn(latest):
            keep(decoded)
    assert tokens == [row[:count] for row, count in zip(oracle.greedy, wanted, strict=True)]


def test_drawn_tokens_do_not_depend_on_stages() -> None:
    drawn = {"temperature": 0.9, "top_k": 20, "seed": 7, "max_new_tokens": 5}
    prompts = load_oracle("llama_9_3").prompts[:2]
    staged, alone = (oracle_runner("llama_9_3", mesh).generate(prompts, **drawn) for mesh in ("pp=2", "tp=1"))
    assert [one.token_ids for one in staged] == [one.token_ids for one in alone]


def test_unequal_chunks_through_stages_give_the_logits_of_transformers() -> None:
    oracle, runner = load_oracle("llama_9_3"), oracle_runner("llama_9_3", "pp=2", chunk=8, chunk_parity=4)
    assert_logits(runner, oracle.prompts, oracle.logits)


# What is idle


@pytest.mark.parametrize(("chunk", "items"), [(19, 1), (2, 10)])
def test_chunks_of_a_prompt_leave_as_much_idle_as_the_timetable_says(chunk: int, items: int) -> None:
    runner = oracle_runner("llama_9_3", "pp=2", chunk=chunk)
    session = open_session(runner, [[1] * 19], 1)
    assert len(list(session.prefill())) == items
    assert session.pipe.ticks == items + 1
    measured = Fraction(session.pipe.idle, 2 * session.pipe.ticks)
    # (p-1) / (m+p-1) of all slots.
    assert measured == prefill_timetable(items, 2).idle_share == Fraction(1, items + 1)


@pytest.mark.parametrize(("microbatches", "requests"), [(2, 1), (2, 2), (3, 3)])
def test_groups_in_rotation_leave_as_much_idle_as_the_timetable_says(microbatches: int, requests: int) -> None:
    runner = oracle_runner("llama_9_3", "pp=2", microbatches=microbatches)
    session, rounds = open_session(runner, [[1, 2]] * requests, 4), 4
    latest = {token: 3 for chunk in session.prefill() for token in chunk.decoded.tokens}
    ticks, idle, tokens = session.pipe.ticks, session.pipe.idle, 0
    while latest or not session.pipe.is_empty:
        for step in session.turn(latest):
            tokens += len(step.rows)
            latest.update({request: 3 for request in step.rows if tokens <= (rounds - 1) * requests})
    table = decode_timetable(requests, rounds, 2)
    assert tokens == rounds * requests
    assert (session.pipe.ticks - ticks, session.pipe.idle - idle) == (table.ticks, table.idle_slots)


@pytest.mark.parametrize(("microbatches", "requests"), [(2, 1), (3, 3)])
def test_verify_times_a_rotation_as_a_decode_step(
    monkeypatch: pytest.MonkeyPatch, microbatches: int, requests: int
) -> None:
    runner, ticks = oracle_runner("llama_9_3", "pp=2", microbatches=microbatches), list[StepOutput]()
    monkeypatch.setattr(verify_all, "time", SimpleNamespace(perf_counter=lambda: len(ticks)))
    runner.programs.watchers.append(ticks.append)
    prefill, decode = verify_all.time_run(runner, [[1, 2]] * requests, new_tokens=5)
    runner.programs.watchers.remove(ticks.append)
    assert decode == max(requests, 2)
    assert len(ticks) - prefill == decode_timetable(requests, 4, 2).ticks


def test_verify_makes_tokens_in_rotation_as_generate_does() -> None:
    runner, ticks = oracle_runner("llama_9_3", "pp=2", microbatches=2), list[StepOutput]()
    runner.programs.watchers.append(ticks.append)
    assert verify(runner, oracle_runner("llama_9_3", "tp=1"), [[1, 2], [3, 4]], new_tokens=5).passed
    runner.programs.watchers.remove(ticks.append)
    of_tokens = [output for output in ticks if output.logits is None]
    assert len(of_tokens) == prefill_timetable(2, 2).ticks + decode_timetable(2, 4, 2).ticks


# What hops


@pytest.mark.parametrize(("mesh", "sent"), [("pp=4", 1), ("pp=4,tp=2", 1), ("pp=2,dp=2", 2)])
def test_a_decode_step_sends_every_request_s_hidden_state_once_over_each_boundary(mesh: str, sent: int) -> None:
    plan, config = Plan(MeshSpec.parse(mesh), dtype="bfloat16"), oracle_runner("qwen2_sliding", "tp=1").config
    counted = make_ledger(config, plan, "decode", 32, 16)
    (row,) = [row for row in counted.traffic if row.sublayer == "pipeline"]
    assert counted.differences == []
    # Every group once: B * D * b in all, of each replica.
    assert (row.collective, row.axes, row.calls) == ("ppermute", ("pp",), plan.mesh.pp)
    assert row.sent_bytes == 32 // sent * config.hidden_size * 2


def boundaries(mesh: str, phase: Phase, batch: int, seq: int, **plan: Any) -> tuple[int, int, int, int]:
    """Hops of an item, items, and rows that are sent and that are of no use."""
    config = oracle_runner("qwen2_sliding", "tp=1").config
    ledger = make_ledger(config, Plan(MeshSpec.parse(mesh), **plan), phase, batch, seq)
    assert ledger.boundaries is not None
    hops, items, *of_bytes = ledger.boundaries
    # A rank that sends does so in every tick.
    assert of_bytes[0] == hops * sum(row.sent_bytes for row in ledger.traffic if row.sublayer == "pipeline")
    sent, unused = (count // (4 * config.hidden_size) for count in of_bytes)
    return hops, items, sent, unused


def test_all_boundaries_together_send_items_their_padding_and_padding_in_idle_ticks() -> None:
    # 4 groups of 9 requests in 16 lanes, of 16 in as many, and 2 groups of one request in 4 ticks.
    assert boundaries("pp=4", "decode", 36, 16) == (3, 4, 3 * 4 * 16, 3 * 4 * 7)
    assert boundaries("pp=4", "decode", 64, 16) == (3, 4, 3 * 4 * 16, 0)
    assert boundaries("pp=4", "decode", 2, 16) == (3, 2, 3 * 4, 3 * 2)
    assert boundaries("pp=4,dp=2,tp=2", "decode", 4, 16) == (3, 2, 3 * 4, 3 * 2)
    # 21 tokens are chunks of 16 and 5, in three ticks: 16 rows, 16 rows, and 8 for 5.
    assert boundaries("pp=2", "prefill", 1, 21, chunk=16) == (1, 2, 16 + 16 + 8, 16 + 16 + 8 - 21)
    # A slice of the first 8 rows of each chunk has 8 and 5 real ones.
    assert boundaries("pp=2,tp=2", "prefill", 1, 21, chunk=16, sequence_parallel=True) == (1, 2, 8 * 3, 8 * 3 - 8 - 5)


def test_a_split_residual_stream_sends_a_slice_of_its_rows() -> None:
    config = oracle_runner("qwen2_sliding", "tp=1").config
    whole, split = (
        make_ledger(config, Plan(MeshSpec(pp=2, tp=2), sequence_parallel=split), "prefill", 1, 32).traffic
        for split in (False, True)
    )
    of_whole, of_split = ([row.sent_bytes for row in rows if row.sublayer == "pipeline"] for rows in (whole, split))
    assert of_whole == [2 * size for size in of_split]


# What a stage skips


def products(name: str, mesh: str, stages: str, phase: Phase) -> tuple[Counter[str], Counter[str], list[Any]]:
    """Products by sublayer that every stage computes, those that some stages skip, and what may be skipped gives."""
    config, plan = oracle_runner(name, "tp=1").config, Plan(MeshSpec.parse(mesh), page_size=4, stages=stages)
    programs, step = Programs(config, plan, abstract_mesh(plan.mesh)), Step(config, plan, phase, 2, 1, 12)
    traced = jax.make_jaxpr(programs.spmd(phase))(*programs.abstract_arguments(step, pages=8))
    run, skipped, given = Counter[str](), Counter[str](), []

    def visit(jaxpr: Any, scopes: str, is_skipped: bool) -> None:
        for eqn in equations(jaxpr):
            inside, may_skip = scopes_of(eqn, scopes), is_skipped
            if eqn.primitive.name in ("dot_general", "ragged_dot_general"):
                (skipped if is_skipped else run)[scope_of(inside)[0]] += 1
            if eqn.primitive.name == "cond" and "pp" in varying_axes(eqn.invars[0].aval):
                may_skip = True
                given.extend(out.aval for out in eqn.outvars)
            for inner in inner_jaxprs(eqn):
                visit(inner, inside, may_skip)

    visit(traced, "", False)
    return run, skipped, given


@pytest.mark.parametrize("phase", PHASES)
def test_a_stage_skips_the_products_of_layers_that_it_has_not_and_no_others(phase: Phase) -> None:
    of_one, head, _ = products("qwen2_sliding", "pp=4", "even", phase)
    # Two slots that both stages have: twice the products of one, and only the head is skipped.
    assert products("qwen2_sliding", "pp=2", "even", phase)[:2] == (of_one + of_one, head)
    # One slot that both have, and two that only the second has.
    run, skipped, given = products("qwen2_sliding", "pp=2", "1,3", phase)
    assert (run, skipped) == (of_one, of_one + of_one + head)
    # A cache plane has five dimensions, and would be copied.
    assert all(array.ndim < 5 for array in given)


def test_a_stage_skips_the_half_of_a_slot_of_both_kinds_that_it_has_not() -> None:
    # A dense layer on the first stage, two with experts on the second.
    run, skipped, _ = products("deepseek_v3", "pp=2", "1,2", "decode")
    assert run.keys() == {"attention", "decode_attention"}
    assert skipped.keys() == {"attention", "decode_attention", "ffn", "moe", "experts", "head"}


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"two_batch_overlap": True, "microbatches": 1}, "two_batch_overlap on pp=2 with microbatches=1"),
        ({"expert_slots": 8}, "expert_slots=8 on pp=2"),
    ],
)
def test_what_stages_cannot_do_is_refused_with_the_remedy(plan: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan(MeshSpec(pp=2), **plan)


def test_more_stages_than_layers_are_refused_before_anything_is_loaded() -> None:
    with pytest.raises(PlanError, match="pp=3 for 2 layers: a stage needs one at least; use pp <= 2"):
        jaxpar.load(ROOT / "llama", mesh="pp=3")
