"""What latent attention stores and computes, and what copies of its cache cost: DeepSeek-V3's figures."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from command_line import run

from jaxpar.assets import model_dir
from jaxpar.attention.planes import planes_of, values_a_token
from jaxpar.checkpoint import read_config
from jaxpar.devices import abstract_mesh
from jaxpar.ledger.latents import Latents
from jaxpar.ledger.report import Ledger, make_ledger
from jaxpar.mesh import MeshSpec
from jaxpar.plan import Plan
from jaxpar.program import Programs

# Its layers with a dense FFN: attention is the same in all of them.
DEEPSEEK_V3 = replace(read_config(model_dir("deepseek-v3")), moe=None)
ONE_LAYER = replace(DEEPSEEK_V3, num_hidden_layers=1, windows=(None,))


KIB = 2**10


def ledger(batch: int, seq: int, phase: str = "decode", **mesh: int) -> Ledger:
    return make_ledger(ONE_LAYER, Plan(MeshSpec(**mesh), dtype="bfloat16"), phase, batch, seq)


def latents(batch: int, seq: int, **mesh: int) -> Latents:
    found = ledger(batch, seq, **mesh).latents
    assert found is not None
    return found


def test_the_cache_has_576_values_a_token_and_layer_35136_bytes_of_one_byte_values_whatever_tp_is() -> None:
    for tp in (1, 8):
        assert sum(plane.heads * plane.size for plane in planes_of(DEEPSEEK_V3, Plan(MeshSpec(tp=tp)))) == 576
    assert DEEPSEEK_V3.num_hidden_layers * values_a_token(DEEPSEEK_V3, Plan()) == 35_136


def test_attention_has_187105280_parameters_in_the_projections_of_a_layer_and_11_413_g_in_all() -> None:
    plan = Plan()
    weights = Programs(DEEPSEEK_V3, plan, abstract_mesh(plan.mesh)).weights
    sizes = {name: weight.abstract.shape for name, weight in weights.items() if ".attention." in name}
    matrices = {name: int(np.prod(shape)) for name, shape in sizes.items() if len(shape) == 3}
    assert sum(size for name, size in matrices.items() if name.startswith("slots.0.")) == 187_105_280
    assert sum(matrices.values()) == 61 * 187_105_280 == 11_413_422_080


def test_the_best_tp_of_attention_on_32_ranks_is_4_45_then_2_23_then_0_79_for_512_requests_of_1k_4k_and_32k() -> None:
    best = [latents(512, context * 2**10, dp=8, tp=4).best_tp for context in (1, 4, 32)]
    assert [round(tp, 2) for tp in best] == [4.45, 2.23, 0.79]


def test_decode_over_cp_sends_queries_and_outputs_at_the_sizes_of_heads_not_of_latents() -> None:
    def sent(strategy: str) -> dict[str, int]:
        plan, total = Plan(MeshSpec(cp=2, tp=2), dtype="bfloat16", decode_attention=strategy), Counter[str]()
        for row in make_ledger(ONE_LAYER, plan, "decode", 64, 64).traffic:
            if row.sublayer == "decode_attention":
                total[row.collective] += row.sent_bytes
        return dict(total)

    # 64 requests, 64 heads on a rank of tp: of each query 192 numbers and of each output 128, half to the other rank.
    queries, outputs, lse = 64 * 32 * 192 * 2, 64 * 32 * 128 * 2, 64 * 32 * 4
    assert (queries, outputs, lse) == (768 * KIB, 512 * KIB, 8 * KIB)
    assert sent("a2a") == {"all_gather": queries, "all_to_all": outputs + lse}
    assert sent("q_replicated") == {"all_to_all": outputs + lse}
    assert sent("ag_rs") == {"all_gather": queries + 2 * lse, "reduce_scatter": outputs}


def test_of_meshes_of_32_ranks_that_with_the_tp_nearest_the_best_holds_the_least_of_weights_and_latents() -> None:
    held = {}
    for tp in (1, 2, 4, 8, 16, 32):
        counted = ledger(512, 1024, dp=32 // tp, tp=tp)
        found = latents(512, 1024, dp=32 // tp, tp=tp)
        # What the formula has for the cache is what a rank holds.
        assert counted.needed_cache_bytes == found.cache_bytes * tp // 32
        held[tp] = found.read(tp)
    assert min(held, key=lambda tp: held[tp]) == 4


@pytest.mark.parametrize("mesh", [{"tp": 4}, {"dp": 2, "tp": 4}, {"cp": 2, "tp": 4}], ids=str)
def test_every_rank_of_tp_holds_the_whole_latents_and_the_ledger_says_how_much_of_all_caches_are_copies(
    mesh: dict[str, int],
) -> None:
    split, alone = ledger(16, 2048, **mesh), ledger(16, 2048)
    ranks = split.plan.mesh.size
    assert split.cache_bytes * ranks == 4 * alone.cache_bytes
    assert split.copied_cache_bytes == 3 * alone.cache_bytes
    assert alone.copied_cache_bytes == 0


def test_what_is_predicted_of_deepseek_is_what_is_traced() -> None:
    for phase in ("prefill", "decode"):
        for mesh in ({"tp": 8}, {"dp": 2, "cp": 2, "tp": 2}):
            assert ledger(3, 700, phase, **mesh).differences == []


def test_decode_reads_latents_without_making_keys_of_them_and_prefill_makes_each_once() -> None:
    heads, tokens = 128, 1024
    per_query = 2 * heads * 512 * (128 + 128)
    decode, prefill = (ledger(1, tokens, phase) for phase in ("decode", "prefill"))
    assert decode.flops["decode_attention"] == per_query + 2 * heads * tokens * (576 + 512)
    chunks = [(512, 512), (512, 1024)]  # queries and cached keys of the two steps
    expected = sum(per_query * keys + 2 * heads * queries * keys * (192 + 128) for queries, keys in chunks)
    assert prefill.flops["prefill_attention"] == expected


def test_the_command_says_what_is_held_more_than_once(tmp_path: Path) -> None:
    card = json.loads((model_dir("deepseek-v3") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(card | {"num_hidden_layers": 2, "first_k_dense_replace": 2}))
    ask = ("ledger", tmp_path, "--mesh", "dp=8,tp=4", "--batch", 512, "--context", 1024, "--no-compile")
    text, document = run(*ask).out, json.loads(run(*ask, "--json").out)
    assert "copies and padding over tp" in text
    assert "Every rank of tp=4 holds the latents of its requests." in text
    assert "least at tp = 4.45" in text
    assert round(document["latents"]["best_tp"], 2) == 4.45
    assert document["copied_cache_bytes"] == 24 * document["cache_bytes"]
