"""The ledger of a whole step: figures of public models, agreement of its three sides, and the command."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from command_line import run
from sample_models import open_session, oracle_runner

from jaxpar.assets import model_dir
from jaxpar.batch import StepOutput
from jaxpar.checkpoint import ModelConfig, read_config
from jaxpar.devices import abstract_mesh, ensure_devices, make_mesh
from jaxpar.errors import PlanError
from jaxpar.layout import deal
from jaxpar.ledger.memory import Memory, memory_of
from jaxpar.ledger.report import Ledger, make_ledger
from jaxpar.ledger.traffic import Traffic
from jaxpar.mesh import MeshSpec
from jaxpar.plan import PHASES, Phase, Plan
from jaxpar.program import Programs

MIB = 2**20
LLAMA_70B = read_config(model_dir("llama-3-70b"))


def ledger_70b(batch: int, seq: int, phase: str = "decode", **mesh: int) -> Ledger:
    return make_ledger(LLAMA_70B, Plan(mesh=MeshSpec(**mesh), dtype="bfloat16"), phase, batch, seq)


def memory_70b(batch: int, seq: int, **mesh: int) -> Memory:
    plan = Plan(mesh=MeshSpec(**mesh), dtype="bfloat16")
    return memory_of(Programs(LLAMA_70B, plan, abstract_mesh(plan.mesh)), "decode", batch, seq)


def parameters(config: ModelConfig) -> int:
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    attention = config.hidden_size * config.head_dim * (heads + config.num_attention_heads)
    return config.num_hidden_layers * (attention + 3 * config.hidden_size * config.intermediate_size)


def test_llama_3_70b_on_tp_8_sends_280_mib_in_160_all_reduces_of_1_mib() -> None:
    counted = ledger_70b(64, 4096, tp=8)
    assert [row for row in counted.traffic if row.message_bytes == MIB] == [
        Traffic("embedding", "vocab_parallel", "all_reduce", ("tp",), 1, MIB, MIB * 7 // 4),
        Traffic("attention", "psum", "all_reduce", ("tp",), 80, MIB, 140 * MIB),
        Traffic("ffn", "psum", "all_reduce", ("tp",), 80, MIB, 140 * MIB),
    ]
    assert counted.differences == []


def test_the_kv_cache_of_llama_3_70b_is_2684354560_bytes_a_request_of_8192_tokens_over_all_ranks() -> None:
    assert memory_70b(1, 8192, tp=8).cache_bytes * 8 == 2_684_354_560
    assert memory_70b(64, 8192, tp=8).cache_bytes * 8 == 64 * 2_684_354_560
    assert memory_70b(64, 8192, dp=2, tp=4).cache_bytes * 8 == 64 * 2_684_354_560


def test_more_ranks_than_kv_heads_store_each_of_them_twice() -> None:
    counted = memory_70b(1, 8192, tp=16)
    assert counted.cache_bytes * 16 == 2 * 2_684_354_560
    assert counted.copied_cache_bytes == 2_684_354_560
    assert memory_70b(1, 8192, tp=8).copied_cache_bytes == 0


def test_one_device_holds_every_parameter_once_and_two_flops_a_token_for_each() -> None:
    counted = ledger_70b(16, 16, tp=1)
    table = LLAMA_70B.vocab_size * LLAMA_70B.hidden_size
    norms = (2 * LLAMA_70B.num_hidden_layers + 1) * LLAMA_70B.hidden_size
    assert counted.weight_bytes == 2 * (parameters(LLAMA_70B) + 2 * table + norms) == 141_107_412_992
    scores = 4 * 16 * 16 * LLAMA_70B.num_hidden_layers * LLAMA_70B.num_attention_heads * LLAMA_70B.head_dim
    assert sum(counted.flops.values()) == 2 * 16 * (parameters(LLAMA_70B) + table) + scores
    assert counted.traffic == []


@pytest.mark.parametrize("mesh", [{}, {"tp": 3}, {"dp": 3}, {"dp": 2, "tp": 4}, {"dp": 8, "tp": 8}], ids=str)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_predicted_is_what_is_traced(mesh: dict[str, int], phase: str, dtype: str) -> None:
    config = replace(LLAMA_70B, num_hidden_layers=2, windows=(None, 100))
    for batch, seq, sampled in ((1, 1, False), (3, 50, True), (7, 2500, False)):
        plan = Plan(mesh=MeshSpec(**mesh), dtype=dtype, chunk=200)
        assert make_ledger(config, plan, phase, batch, seq, sampled=sampled).differences == []


def test_a_prompt_of_several_chunks_is_counted_by_all_its_steps_at_the_sizes_that_they_run_at() -> None:
    config = replace(LLAMA_70B, num_hidden_layers=2, windows=(None, None))
    counted = make_ledger(config, Plan(chunk=512), "prefill", 3, 1900)
    steps = [(part.count, part.step.lanes, part.step.tokens, part.step.keys) for part in counted.steps]
    assert steps == [(1, 4, 512, 512), (1, 4, 512, 1024), (2, 4, 512, 2048)]
    assert sum(counted.flops.values()) == sum(part.count * sum(part.flops.values()) for part in counted.steps)


def test_a_cache_is_counted_as_the_pool_that_holds_it_and_as_the_tokens_that_need_it() -> None:
    counted = memory_70b(5, 100, dp=2, tp=4)
    a_token = 2 * 80 * 2 * 128 * 2
    assert counted.pages == 22  # three requests of 7 pages on the fuller replica, rounded up
    assert counted.cache_bytes == 22 * 16 * a_token
    assert counted.needed_cache_bytes == 3 * 100 * a_token


@pytest.mark.parametrize(
    ("mesh", "batch", "seq", "plan"),
    [
        ("dp=2,tp=2", 5, 37, {}),
        ("dp=3", 20, 21, {}),
        ("tp=4", 1, 40, {}),
        ("dp=2,cp=2,tp=2", 5, 37, {}),
        ("dp=2,tp=2", 5, 37, {"two_batch_overlap": True}),
        ("tp=4", 1, 40, {"two_batch_overlap": True}),
        ("dp=2,cp=2,tp=2", 6, 38, {"two_batch_overlap": True, "layout": "contiguous"}),
        ("cp=3", 3, 75, {"two_batch_overlap": True, "layout": "zigzag"}),
        ("pp=2", 1, 37, {}),
        ("pp=2,tp=2", 5, 37, {"sequence_parallel": True}),
        ("pp=2,cp=2", 7, 37, {"microbatches": 3}),
        ("pp=2,dp=2", 5, 37, {"microbatches": 3, "chunk_parity": 20}),
        ("pp=2,cp=2", 1, 60, {"chunk_parity": 20, "sequence_parallel": True}),
        ("pp=2,ep=4", 5, 37, {"name": "qwen3_moe", "moe_dispatch": "standard"}),
    ],
)
def test_the_ledger_counts_the_shapes_that_a_session_runs(
    mesh: str, batch: int, seq: int, plan: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = oracle_runner(**{"name": "llama_9_3", "mesh": mesh, "page_size": 8, "chunk": 16, **plan})
    ran: list[tuple[Phase, int, str]] = []

    # Shapes are all that matters here: no step is compiled.
    def watched(phase: Phase, logits: bool, sampled: bool, room: int) -> Any:
        def run(weights: Any, cache: Any, batch: Any) -> Any:
            ran.append((phase, room, str(jax.tree.map(np.shape, (cache, batch)))))
            return cache, StepOutput(None, None, None, None, None)

        return run

    monkeypatch.setattr(runner.programs, "step", watched)
    for phase in PHASES:
        ledger = make_ledger(runner.config, runner.plan, phase, batch, seq)
        # In the first round of decode stages fill up, in the second one they are full.
        rounds = 0 if phase == "prefill" else len(runner.plan.pipeline) + 1
        session = open_session(runner, [[1] * (seq - rounds)] * batch, rounds)
        ran.clear()
        for _ in session.prefill():
            pass
        latest = dict.fromkeys(range(batch), 1)
        for _ in range(rounds):
            ran.clear()
            for _ in range(sum(part.count for part in ledger.steps)):
                for decoded in session.turn(latest):
                    latest |= dict.fromkeys(decoded.rows, 1)
        counted = [
            (phase, part.step.room, str(jax.tree.map(np.shape, arguments[1:])))
            for part in ledger.steps
            for arguments in [runner.programs.abstract_arguments(part.step, ledger.pages)]
            for _ in range(part.count)
        ]
        assert Counter(ran) == Counter(counted)
        if phase == "prefill":
            assert session.pipe.idle / (session.pipe.ticks * runner.plan.mesh.pp) == pytest.approx(ledger.idle_share)


def test_weights_and_cache_are_counted_as_the_devices_hold_them() -> None:
    runner = oracle_runner("llama_9_3", "dp=2,tp=4")
    counted = runner.ledger("decode", batch=4, seq=32)
    first = runner.programs.mesh.devices.flat[0]
    shards = [s.data.nbytes for w in runner.weights.values() for s in w.addressable_shards if s.device == first]
    assert counted.weight_bytes == sum(shards)
    # 3 KV heads over tp=4: one on each rank, the last one padding.
    assert counted.cache_bytes == 2 * 2 * 32 * 2 * 1 * 8 * 4


def test_the_compiler_leaves_the_collectives_of_float32_alone_and_promotes_those_of_bfloat16() -> None:
    plain = oracle_runner("llama_9_3", "dp=2,tp=4").ledger("decode", batch=4, seq=32)
    assert plain.compiled is not None
    assert plain.compiled.changes == []
    assert plain.compiled.temporary_bytes > 0
    halved = oracle_runner("llama_9_3", "dp=2,tp=4", dtype="bfloat16").ledger("decode", batch=4, seq=32)
    assert halved.compiled is not None
    assert [change.change for change in halved.compiled.changes] == ["promoted"]
    assert halved.sent_bytes < plain.sent_bytes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", 1, 16), "phase='train' is unknown: use prefill or decode"),
        (("decode", 0, 16), "batch=0: it must be at least 1"),
        (("decode", 1, 0), "context=0: it must be at least 1"),
        (("prefill", 1, 8193), "8193 tokens of a request are more than the model's 8192 positions"),
    ],
)
def test_a_step_that_cannot_be_is_refused_with_the_numbers(arguments: tuple[str, int, int], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make_ledger(LLAMA_70B, Plan(), *arguments)


# Over cp

WIDE = replace(
    LLAMA_70B,
    vocab_size=64,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=32,
    max_position_embeddings=2**15,
    windows=(None, None),
)
"""Attention with next to nothing around it."""


def temporaries(strategy: str, cp: int, seq: int = 8192) -> float:
    """Of a prefill step on a rank, in sizes of all keys and values of a layer."""
    spec = MeshSpec(cp=cp)
    plan = Plan(spec, prefill_attention=strategy, chunk=seq)
    compiled = make_ledger(WIDE, plan, "prefill", 1, seq, make_mesh(spec, ensure_devices(spec))).compiled
    assert compiled is not None
    assert compiled.changes == []
    return compiled.temporary_bytes / (2 * 4 * seq * 32 * 4)


def test_what_a_ring_needs_falls_as_1_over_cp_and_is_never_all_keys_and_values() -> None:
    two, eight = temporaries("ring", 2), temporaries("ring", 8)
    assert eight < 1
    assert eight < 0.35 * two


def test_what_a_gather_of_the_keys_needs_stays_above_all_keys_and_values() -> None:
    two, eight = temporaries("all_gather", 2), temporaries("all_gather", 8)
    assert eight > 1
    assert eight > 0.6 * two


def test_halves_of_cp_that_ulysses_exchanges_over_are_found_in_the_compiled_program() -> None:
    assert temporaries("usp", 8, 1024) > 0


ONE_HEAD = replace(WIDE, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, windows=(None,))
DEALT = {"contiguous": [36, 100, 164, 228], "zigzag": [132] * 4, "striped": [120, 128, 136, 144]}


@pytest.mark.parametrize("layout", DEALT)
def test_the_work_of_each_rank_is_that_of_the_queries_or_the_keys_that_it_keeps(layout: str) -> None:
    def seen(strategy: str, config: ModelConfig = ONE_HEAD) -> list[int]:
        plan = Plan(MeshSpec(cp=4), layout=layout, prefill_attention=strategy)
        work = make_ledger(config, plan, "prefill", 1, 32).work
        assert work is not None
        return work.seen

    assert seen("ring") == seen("all_gather") == DEALT[layout]
    # A key is seen by the queries after it: of 32, the one at position p by 32 - p.
    owners = deal(layout, 0, 32, 4)
    assert seen("ring_q") == [int((32 - held).sum()) for held in owners]
    # Ulysses gives each of four ranks one of four heads, and all positions.
    assert seen("ulysses", replace(ONE_HEAD, num_attention_heads=4, num_key_value_heads=4)) == [528] * 4


def test_the_work_of_a_sliding_window_is_that_of_the_keys_in_it() -> None:
    config = replace(WIDE, windows=(None, 100))
    work = make_ledger(config, Plan(MeshSpec(cp=4), chunk=4096), "prefill", 1, 4096).work
    assert work is not None
    in_window = 100 * 101 // 2 + (4096 - 100) * 100
    assert sum(work.seen) == 4 * (4096 * 4097 // 2 + in_window)
    assert work.excess < 1.6


def test_copies_and_padding_of_heads_are_computed_and_not_seen() -> None:
    config = replace(WIDE, num_attention_heads=5, num_key_value_heads=5)
    work = make_ledger(config, Plan(MeshSpec(cp=4), prefill_attention="ulysses"), "prefill", 1, 32).work
    assert work is not None
    assert work.seen == [2 * 2 * 528, 2 * 2 * 528, 2 * 528, 0]
    # Each rank has eight tokens of 32 and a page of 16 slots for their keys.
    assert work.computed == [2 * 2 * 32 * 64] * 4


@pytest.mark.parametrize("strategy", ["ring", "ring_q", "all_gather", "ulysses", "usp"])
@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_tiles_that_no_query_sees_are_left_out_so_that_five_percent_are_computed_in_vain(
    layout: str, strategy: str
) -> None:
    plan = Plan(MeshSpec(cp=4), layout=layout, prefill_attention=strategy, chunk=2**15)
    counted = make_ledger(WIDE, plan, "prefill", 1, 2**15).work
    assert counted is not None
    assert 1 <= counted.excess < 1.05
    assert max(counted.computed) < 1.05 * sum(counted.computed) / 4


def test_decode_over_cp_sends_the_same_however_long_the_context_is() -> None:
    for strategy in ("ag_rs", "a2a", "q_replicated", "helix"):
        plan = Plan(MeshSpec(cp=4), decode_attention=strategy)
        short, long = (make_ledger(WIDE, plan, "decode", 4, seq) for seq in (64, 2**15))
        assert short.traffic == long.traffic
        assert short.cache_bytes * 2**9 == long.cache_bytes


# One layer of Qwen3-235B-A22B on tp 4, cp 2, bfloat16: 64 query and 4 KV heads of 128.
CARD = read_config(model_dir("qwen3-235b-a22b"))
assert CARD.moe is not None
QWEN3_235B = replace(CARD, num_hidden_layers=1, windows=(None,), moe=replace(CARD.moe, layers=(True,)))
KIB = 2**10


def sent(batch: int, seq: int, **plan: Any) -> dict[str, int]:
    """Bytes that attention sends in a layer, by collective."""
    spec, phase = MeshSpec(cp=2, tp=4), "prefill" if "prefill_attention" in plan else "decode"
    counted = make_ledger(QWEN3_235B, Plan(spec, dtype="bfloat16", chunk=seq, **plan), phase, batch, seq)
    assert counted.differences == []
    total: dict[str, int] = {}
    for row in counted.traffic:
        if row.sublayer == f"{phase}_attention":
            total[row.collective] = total.get(row.collective, 0) + row.sent_bytes
    return total


def test_decode_of_qwen3_235b_sends_256_kib_with_gathered_queries_and_128_without_beside_the_lse() -> None:
    by = {name: sent(64, 64, decode_attention=name) for name in ("ag_rs", "a2a", "q_replicated", "helix")}
    # Two ranks: gathered, a rank sends the LSE of its 16 heads whole; packed, those of the 8 heads of the other rank.
    assert by == {
        "ag_rs": {"all_gather": (128 + 4) * KIB, "reduce_scatter": 128 * KIB},
        "a2a": {"all_gather": 128 * KIB, "all_to_all": (128 + 2) * KIB},
        "q_replicated": {"all_to_all": (128 + 2) * KIB},
        "helix": {"all_to_all": (128 + 2) * KIB},
    }


def test_a_ring_of_qwen3_235b_sends_8_mib_a_layer_and_a_gather_of_its_keys_the_same() -> None:
    positions = 32768 // 2 * 4
    assert sent(1, 32768, prefill_attention="ring") == {"ppermute": 8 * MIB, "all_gather": positions}
    assert sent(1, 32768, prefill_attention="all_gather") == {"all_gather": 8 * MIB + positions}


# The command


def test_the_command_counts_a_bare_config_on_any_mesh_without_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "devices", None)
    done = run("ledger", "llama-3-70b", "--mesh", "dp=4,tp=16", "--batch", 64, "--context", 4096, "--no-compile")
    assert done.status in (0, None)
    assert "Predicted by closed form = traced from the jaxpr" in done.out


def test_the_command_takes_a_preset_and_says_what_its_device_has() -> None:
    done = run("ledger", "llama-3.1-8b", "--mesh", "h20-32", "--batch", 64, "--no-compile")
    assert done.status in (0, None)
    assert "NVIDIA H20 has" in done.out


def test_json_has_every_figure() -> None:
    done = run("ledger", "llama-3-70b", "--mesh", "tp=8", "--batch", 64, "--context", 4096, "--no-compile", "--json")
    document = json.loads(done.out)
    assert document["agree"] is True
    assert sum(row["calls"] for row in document["traffic"] if row["strategy"] == "psum") == 160
    assert document["sent_bytes"] == sum(row["sent_bytes"] for row in document["traffic"])
    assert math.isclose(document["weight_bytes"] * 8, 141_107_412_992, rel_tol=1e-3)


def test_a_closed_form_that_is_wrong_is_named_and_ends_with_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxpar.ledger.report.predict_flops", lambda step: {"attention": 1})
    done = run("ledger", "llama-3.1-8b", "--mesh", "tp=2", "--no-compile")
    assert done.status == 1
    assert "attention FLOPs: predicted 1, traced" in done.out
