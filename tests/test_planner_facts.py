"""Figures that everybody can recompute come out of the planner's own functions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxpar.assets import model_dir
from jaxpar.checkpoint import read_config
from jaxpar.kinds import KINDS
from jaxpar.ledger.needed import experts_touched, routed
from jaxpar.mesh import MeshSpec
from jaxpar.plan import Plan
from jaxpar.planner.assumptions import Assumptions, ideal
from jaxpar.planner.reference import unhindered
from jaxpar.planner.roofline import Part, predicted
from jaxpar.planner.timing import cache_bytes, decode_time, prefill_time, step_time, transfer_seconds
from jaxpar.planner.workload import Workload
from jaxpar.presets import DeviceKind
from jaxpar.strategies import Step

KIB, MIB, GIB = 2**10, 2**20, 2**30
LLAMA = read_config(model_dir("llama-3-70b"))
QWEN = read_config(model_dir("qwen3-235b-a22b"))
DEEPSEEK = read_config(model_dir("deepseek-v3"))
H200, H100 = unhindered(KINDS["h200"]), unhindered(KINDS["h100"])
TOKENS = 32768


def bf16(**changes: object) -> Plan:
    return Plan(**{"dtype": "bfloat16", "max_num_seqs": 4096, "chunk": TOKENS} | changes)  # type: ignore[arg-type]


def part(step: Step, name: str, device: DeviceKind = H200, *, seen: int, **assumed: object) -> Part:
    time = step_time(step, device, ideal(**assumed), seen=seen)
    return next(found for found in time.parts if found.name == name)


def test_decode_of_qwen3_235b_on_tp_8_sends_188_messages_of_512_kib_which_are_164_5_mib() -> None:
    rows = predicted(Step(QWEN, bf16(mesh=MeshSpec(tp=8)), "decode", 64, 1, 4096), 1.0)
    sums = [row for row in rows if row.sublayer in ("attention", "moe")]
    assert {row.message_bytes for row in sums} == {512 * KIB}
    assert sum(row.calls for row in sums) == 188
    assert {row.sent_bytes / row.calls for row in sums} == {0.875 * MIB}
    assert sum(row.sent_bytes for row in sums) == 164.5 * MIB


@pytest.mark.parametrize(("cp", "milliseconds"), [(1, 10.075), (2, 5.038)])
def test_prefill_of_32768_tokens_of_qwen3_235b_on_tp_4_takes_10_075_ms_a_layer_and_half_of_it_on_cp_2(
    cp: int, milliseconds: float
) -> None:
    layer = replace(QWEN, num_hidden_layers=1, windows=(None,), moe=None)
    step = Step(layer, bf16(mesh=MeshSpec(cp=cp, tp=4)), "prefill", 1, TOKENS // cp, TOKENS // cp)
    attention = part(step, "prefill_attention", seen=0, skip_masked=False)
    projections = part(step, "attention", seen=0)
    assert attention.flops * cp == pytest.approx(8.796e12, rel=1e-3)
    assert projections.flops * cp == pytest.approx(1.168e12, rel=1e-3)
    assert 1e3 * (attention.compute + projections.compute) == pytest.approx(milliseconds, rel=1e-3)
    causal = part(step, "prefill_attention", seen=0)
    assert causal.flops == pytest.approx(attention.flops / 2, rel=1e-3)


def test_a_ring_moves_8_mib_of_its_keys_in_18_64_us_and_hides_them() -> None:
    layer = replace(QWEN, num_hidden_layers=1, windows=(None,), moe=None)
    plan = bf16(mesh=MeshSpec(cp=2, tp=4), prefill_attention="ring")
    step = Step(layer, plan, "prefill", 1, TOKENS // 2, TOKENS // 2)
    hops = [row for row in predicted(step, 1.0) if row.collective == "ppermute"]
    assert sum(row.sent_bytes for row in hops) == 8 * MIB
    attention = part(step, "prefill_attention", seen=0)
    assert attention.hidden == pytest.approx(18.64e-6, rel=1e-3)


@pytest.mark.parametrize("cp", [1, 2])
def test_decode_of_qwen3_235b_reads_1_gib_a_layer_in_223_7_us_and_computes_for_17_37_and_cp_2_halves_both(
    cp: int,
) -> None:
    layer = replace(QWEN, num_hidden_layers=1, windows=(None,), moe=None)
    step = Step(layer, bf16(mesh=MeshSpec(cp=cp, tp=4)), "decode", 64, 1, TOKENS // cp)
    attention = part(step, "decode_attention", seen=TOKENS - 1)
    assert 1e6 * cp * attention.compute == pytest.approx(17.37, rel=1e-3)
    assert 1e6 * cp * attention.memory == pytest.approx(223.7, rel=2e-3)
    assert attention.bound == "memory"


def test_decode_over_cp_gathers_queries_and_scatters_outputs_in_256_kib_and_the_lse_in_4() -> None:
    layer = replace(QWEN, num_hidden_layers=1, windows=(None,), moe=None)
    plan = bf16(mesh=MeshSpec(cp=2, tp=4), decode_attention="ag_rs")
    rows = predicted(Step(layer, plan, "decode", 64, 1, 4096), 1.0)
    assert sum(row.sent_bytes for row in rows if row.sublayer == "decode_attention") == 256 * KIB + 4 * KIB


def test_a_request_of_llama_70b_alone_on_an_h100_waits_41_8_ms_for_weights_and_0_14_for_arithmetic() -> None:
    # A single row is multiplied as two; the fact is of 70 billion weights, the model has 69.5 that a step reads.
    step = step_time(Step(LLAMA, bf16(), "decode", 2, 1, 16), H100, ideal(), seen=0)
    weights = [part for part in step.parts if part.name in ("attention", "ffn", "head")]
    assert 1e3 * sum(part.memory for part in weights) == pytest.approx(41.79, rel=0.01)
    assert 1e3 * sum(part.compute for part in weights) / 2 == pytest.approx(0.1416, rel=0.01)
    assert step.bound == "memory"


@pytest.mark.parametrize(("context", "best"), [(1024, 4), (4096, 2), (32768, 1)])
def test_latent_attention_reads_least_at_tp_4_of_1k_of_context_2_of_4k_and_1_of_32k(context: int, best: int) -> None:
    def read(tp: int) -> float:
        plan = bf16(mesh=MeshSpec(dp=32 // tp, tp=tp))
        step = Step(DEEPSEEK, plan, "decode", 512 * tp // 32, 1, context)
        names = ("attention", "decode_attention")
        return sum(part(step, name, seen=context - 1, weight_dtype="fp8", kv_dtype="fp8").memory for name in names)

    assert min((1, 2, 4, 8), key=read) == best


def test_equal_chunks_cost_1_minus_a_plus_a_2k_plus_1_over_m() -> None:
    computing = replace(H200, memory_bandwidth=1e18)
    workload, chunks = Workload(32768, 1), 8
    time = prefill_time(LLAMA, bf16(chunk=32768 // chunks), computing, workload, ideal())
    steps = [step for step, _ in time.steps]
    attention = sum(part.seconds for step in steps for part in step.parts if part.name == "prefill_attention")
    share, mean = attention / time.prefill, time.prefill / chunks
    for k, step in enumerate(steps):
        assert step.seconds / mean == pytest.approx(1 - share + share * (2 * k + 1) / chunks, rel=1e-3)


@pytest.mark.parametrize(("stages", "percent"), [(2, 1.54), (4, 4.48), (8, 9.86)])
def test_the_bubble_of_64_items_is_1_54_4_48_and_9_86_percent_of_2_4_and_8_stages(stages: int, percent: float) -> None:
    plan = bf16(mesh=MeshSpec(pp=stages), microbatches=64)
    time = prefill_time(LLAMA, plan, H200, Workload(64, 1), ideal(), batch=64)
    assert round(100 * time.bubble / time.prefill, 2) == percent


def test_one_request_alone_goes_through_all_stages_for_each_token() -> None:
    plan = bf16(mesh=MeshSpec(pp=4))
    assert decode_time(LLAMA, plan, H200, Workload(64, 1), ideal(), 1).ticks == 4


@pytest.mark.parametrize(("tokens", "touched"), [(8, 1.79), (32, 5.10), (128, 7.86)])
def test_of_8_experts_of_256_8_tokens_touch_1_79_32_touch_5_10_and_128_touch_7_86(tokens: int, touched: float) -> None:
    assert round(experts_touched(8, 8, 256, tokens), 2) == touched
    step = Step(DEEPSEEK, bf16(mesh=MeshSpec(ep=32)), "decode", max(1, tokens // 32), 1, 16)
    if tokens >= 32:
        assert round(routed(step).touched, 2) == touched


def test_rows_of_experts_are_58_72_mb_where_tp_splits_their_width_and_1_835_mb_where_32_ranks_have_whole_ones() -> None:
    narrow = Step(DEEPSEEK, bf16(mesh=MeshSpec(tp=32)), "decode", 512, 1, 16)
    whole = Step(DEEPSEEK, bf16(mesh=MeshSpec(ep=32)), "decode", 512 // 32, 1, 16)
    sizes = [routed(step).rows * step.row_bytes / 1e6 for step in (narrow, whole)]
    assert [round(sizes[0], 2), round(sizes[1], 3)] == [58.72, 1.835]


def test_the_cache_of_4000_tokens_of_llama_70b_is_1_31_gb_and_takes_26_ms_over_one_link_of_50_gb_a_second() -> None:
    assert round(cache_bytes(LLAMA, 4000, Assumptions(), "bfloat16") / 1e9, 2) == 1.31
    one, eight = (
        1e3 * transfer_seconds(LLAMA, bf16(mesh=MeshSpec(tp=tp)), H200, Workload(4000, 500), ideal()) for tp in (1, 8)
    )
    assert one == pytest.approx(26.2, rel=0.01)
    assert eight == pytest.approx(one / 8, rel=0.01)
