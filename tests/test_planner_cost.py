"""What a step costs: the slowest rank, what overlaps, what the kernels and small groups of rows cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jaxpar.assets import model_dir
from jaxpar.checkpoint import read_config
from jaxpar.kinds import KINDS
from jaxpar.ledger.needed import Routed
from jaxpar.mesh import MeshSpec
from jaxpar.plan import Plan
from jaxpar.planner.assumptions import Assumptions, ideal
from jaxpar.planner.roofline import Part, filled_rows
from jaxpar.planner.timing import DecodeTime, StepTime, decode_time, prefill_time, step_time
from jaxpar.planner.workload import Workload
from jaxpar.strategies import Step

LLAMA = read_config(model_dir("llama-3-70b"))
QWEN = read_config(model_dir("qwen3-235b-a22b"))
DEEPSEEK = read_config(model_dir("deepseek-v3"))
H200, V5P = KINDS["h200"], KINDS["v5p"]
WORKLOAD = Workload(4000, 500)


def bf16(mesh: MeshSpec, **changes: Any) -> Plan:
    return Plan(mesh, **{"dtype": "bfloat16", "max_num_seqs": 4096, "devices_per_node": 8} | changes)


def prefill_step(plan: Plan, assumed: Assumptions | None = None) -> StepTime:
    step = Step(QWEN, plan, "prefill", 2, 4096 // plan.mesh.cp, 4096 // plan.mesh.cp)
    return step_time(step, H200, assumed or Assumptions(), seen=0)


def part(time: StepTime, name: str) -> Part:
    return next(found for found in time.parts if found.name == name)


def test_a_part_takes_the_longer_of_compute_and_memory_its_kernels_and_what_it_sends_but_for_what_is_hidden() -> None:
    one = Part("ffn", compute=3.0, memory=2.0, kernels=0.5, sending=((("tp",), 4.0),), hidden=1.5)
    assert (one.working, one.sent, one.seconds, one.bound) == (3.5, 4.0, 6.0, "compute")
    assert replace(one, memory=5.0).bound == "memory"
    assert replace(one, hidden=0.0).bound == "tp"
    assert replace(one, kernels=9.0).bound == "latency"


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("prefill_attention", bf16(MeshSpec(cp=2, tp=4), prefill_attention="ring")),
        ("ffn", bf16(MeshSpec(tp=8), sequence_parallel=True, collective_matmul=True)),
        ("moe_dispatch", bf16(MeshSpec(ep=8), moe_dispatch="all_to_all", single_batch_overlap=4)),
        ("moe_dispatch", bf16(MeshSpec(ep=8), moe_dispatch="all_to_all", two_batch_overlap=True)),
    ],
    ids=["ring", "collective matmul", "single batch", "two batches"],
)
def test_what_a_plan_overlaps_is_hidden_and_never_more_than_is_sent_or_computed(name: str, plan: Plan) -> None:
    config = LLAMA if name == "ffn" else QWEN
    step = Step(config, plan, "prefill", 2, 4096 // plan.mesh.cp, 4096 // plan.mesh.cp)
    none, all_ = (step_time(step, H200, ideal(overlap=overlap), seen=0) for overlap in (0.0, 1.0))
    hidden = part(all_, name)
    assert part(none, name).hidden == 0 < hidden.hidden <= hidden.sent
    assert all_.seconds < none.seconds
    assert sum(found.hidden for found in all_.parts) <= sum(found.working for found in all_.parts)


def test_parts_of_a_decode_step_hide_their_exchange_behind_the_next_part() -> None:
    step = Step(LLAMA, bf16(MeshSpec(cp=2, tp=4), decode_overlap=4), "decode", 64, 1, 32768)
    found = part(step_time(step, H200, ideal(), seen=60000), "decode_attention")
    assert found.hidden == pytest.approx(3 / 4 * found.sent)
    step = replace(step, plan=replace(step.plan, decode_overlap=1))
    assert part(step_time(step, H200, ideal(), seen=60000), "decode_attention").hidden == 0


def test_two_half_batches_take_longer_than_the_longer_of_sending_and_computing_and_shorter_than_their_sum() -> None:
    plan = bf16(MeshSpec(ep=8), moe_dispatch="all_to_all", two_batch_overlap=True)
    time = prefill_step(plan, ideal())
    sent, working = (sum(getattr(found, kind) for found in time.parts) for kind in ("sent", "working"))
    assert max(sent, working) < time.seconds < sent + working


def test_the_fullest_rank_sets_the_time_of_experts_where_ranks_have_different_ones() -> None:
    whole, sliced = bf16(MeshSpec(ep=8)), bf16(MeshSpec(tp=8))
    for plan, factor in ((whole, 2.0), (sliced, 1.0)):
        even, uneven = (part(prefill_step(plan, ideal(imbalance=f)), "experts") for f in (1.0, 2.0))
        assert uneven.flops == factor * even.flops


def test_products_of_experts_with_few_rows_compute_whole_tiles() -> None:
    assert filled_rows(Routed(rows=8, touched=8, tokens=8), 64) == 8 * 64
    assert filled_rows(Routed(rows=8000, touched=8, tokens=8000), 64) == 8000 + 8 * 31.5
    assert filled_rows(Routed(rows=8, touched=8, tokens=8), 1) == 8


def test_a_decode_step_reads_only_experts_that_a_token_chose_and_the_context_that_there_is() -> None:
    plan = bf16(MeshSpec(ep=8))
    few, many = (part(decoded(QWEN, plan, batch).step, "experts").bytes for batch in (8, 512))
    assert few < many / 2
    short, long = (part(decoded(QWEN, plan, 64, tokens).step, "decode_attention") for tokens in (1100, 2100))
    assert long.bytes / short.bytes == pytest.approx(2100 / 1100, rel=0.1)


def decoded(config: Any, plan: Plan, batch: int, tokens: int = 4000) -> DecodeTime:
    return decode_time(config, plan, H200, Workload(tokens, 100), Assumptions(), batch)


def test_a_window_bounds_what_decode_reads() -> None:
    near = replace(LLAMA, windows=(1024,) * LLAMA.num_hidden_layers)
    plan = bf16(MeshSpec(tp=8))
    full, window = (part(decoded(config, plan, 64).step, "decode_attention").bytes for config in (LLAMA, near))
    assert window < full / 3


def test_contiguous_chunks_wait_for_the_last_rank_which_sees_under_twice_the_mean() -> None:
    zigzag, contiguous = (
        part(prefill_step(bf16(MeshSpec(cp=8), layout=layout)), "prefill_attention").flops
        for layout in ("zigzag", "contiguous")
    )
    assert 1.8 < contiguous / zigzag < 2


def test_stages_wait_for_the_slowest() -> None:
    def working(stages: str) -> float:
        step = decoded(LLAMA, bf16(MeshSpec(pp=4, tp=2), stages=stages), 64).step
        return sum(part.working for part in step.parts if part.name not in ("head", "embedding"))

    assert working("26,18,18,18") == pytest.approx(working("even") * 26 / 20, rel=1e-3)
    # A head as large as two layers makes the last stage the slowest, of 19 layers and of 20.
    even, fewer = (decoded(LLAMA, bf16(MeshSpec(pp=4, tp=2), stages=cut), 64).step for cut in ("even", "21,20,20,19"))
    assert part(even, "head").working > 0 == part(fewer, "head").working


def test_only_the_last_stage_makes_logits_and_only_the_first_looks_tokens_up() -> None:
    short = decoded(LLAMA, bf16(MeshSpec(pp=4, tp=2), stages="26,18,18,18"), 64).step
    assert part(short, "head").working == 0 < part(short, "embedding").working


def test_weights_of_8_bits_are_read_in_half_the_time_and_multiplied_in_half_of_it() -> None:
    wide, narrow = (prefill_step(bf16(MeshSpec(tp=8)), ideal(weight_dtype=dtype)) for dtype in (None, "fp8"))
    assert part(narrow, "experts").compute == part(wide, "experts").compute / 2
    step = decode_time(QWEN, bf16(MeshSpec(tp=8)), H200, WORKLOAD, ideal(weight_dtype="fp8"), 64).step
    whole = decode_time(QWEN, bf16(MeshSpec(tp=8)), H200, WORKLOAD, ideal(), 64).step
    assert part(step, "experts").memory == pytest.approx(part(whole, "experts").memory / 2, rel=0.02)
    assert part(step, "head").bytes == part(whole, "head").bytes


def test_a_prefix_in_the_cache_leaves_its_tokens_out_and_its_keys_in() -> None:
    plan = bf16(MeshSpec(tp=8), chunk=1000)
    whole, rest = (prefill_time(LLAMA, plan, H200, Workload(4000, 500, prefix=prefix), ideal()) for prefix in (0, 3000))
    assert len(whole.steps) == 4 and len(rest.steps) == 1
    assert rest.prefill == whole.steps[-1][0].seconds


def test_no_efficiency_makes_a_step_faster_than_its_bound() -> None:
    plan = bf16(MeshSpec(ep=8, tp=1))
    for device in (H200, V5P):
        bound, usual = (decode_time(QWEN, plan, device, WORKLOAD, assumed, 256) for assumed in (ideal(), Assumptions()))
        assert bound.tpot < usual.tpot


def test_what_bounds_a_step_adds_up_to_its_seconds() -> None:
    for plan in (bf16(MeshSpec(tp=8)), bf16(MeshSpec(cp=2, tp=4), prefill_attention="ring"), bf16(MeshSpec(ep=8))):
        step = prefill_step(plan, Assumptions(step_overhead=1e-3))
        assert sum(step.bounds.values()) == pytest.approx(step.seconds)
        assert step.bound == max(step.bounds, key=lambda name: step.bounds[name])
        assert step.to_json()["seconds"] == step.seconds
