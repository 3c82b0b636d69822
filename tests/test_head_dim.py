"""KV heads that lie over several ranks of tp, cut along their dimensions: what a rank has, and that nothing is lost."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from oracle_checks import assert_logits, assert_tokens
from oracle_data import load_oracle
from sample_models import SMALL, oracle_runner, write_model
from test_registry import CONFIG, LATENT
from uniform import uniform_control_violations

import jaxpar
from jaxpar.assets import model_dir
from jaxpar.attention import head_dim
from jaxpar.attention.inputs import Inputs
from jaxpar.checkpoint import read_config
from jaxpar.devices import abstract_mesh, ensure_devices, make_mesh
from jaxpar.errors import PlanError
from jaxpar.heads import HeadLayout, heads_of, split_heads, split_inside
from jaxpar.ledger.flops import trace_flops
from jaxpar.ledger.predict import predict_flops, predict_traffic
from jaxpar.ledger.trace import trace_traffic
from jaxpar.ledger.traffic import Traffic, compare
from jaxpar.mesh import MeshSpec
from jaxpar.nn.output import head_slice
from jaxpar.plan import PHASES, Phase, Plan
from jaxpar.program import Programs
from jaxpar.registry import chosen
from jaxpar.strategies import Step
from jaxpar.train.settings import TrainSettings
from jaxpar.train.step import TrainPrograms

KIB, MIB = 2**10, 2**20
# One KV head, two and three; q/k norms; sinks, biases, a window and experts.
ORACLES = [
    ("llama_mqa", "tp=3"),
    ("qwen3", "tp=8"),
    ("gpt_oss", "ep=2,tp=4"),
]
MORE = [
    ("llama_9_3", "tp=6"),
    ("llama_mqa", "tp=6"),
    ("llama_mqa", "dp=2,tp=2"),
    ("qwen3", "dp=2,tp=4"),
    ("qwen2_sliding", "tp=6"),
    ("mistral", "tp=4"),
    ("gpt_oss", "tp=6"),
    ("qwen3_moe", "tp=6"),
    ("llama_gguf", "tp=6"),
]


def dimensions(heads: HeadLayout, rank: int, size: int, paired: bool) -> list[int]:
    """Rows of the checkpoint's tensor that a rank has of its first query head."""
    blocks = head_slice(0, heads.q_heads[rank * heads.q_local], size, heads, rank, paired)
    return [row for block in blocks for row in range(block.start, block.start + block.rows)]


# What each rank has


def test_32_query_and_4_kv_heads_of_128_at_tp_8_are_8_queries_a_rank_and_half_of_each() -> None:
    heads = split_inside(32, 4, 128, 8)
    assert (heads.kv_local, heads.group, heads.parts, heads.slice_of(128)) == (1, 8, 2, 64)
    assert heads.kv_heads == (0, 0, 1, 1, 2, 2, 3, 3)
    assert heads.q_heads[8:16] == tuple(range(8)) and heads.q_heads[16:24] == tuple(range(8, 16))
    assert heads.groups == [[0, 1], [2, 3], [4, 5], [6, 7]]
    # Queries and keys by rotary pairs, values in order; rank 2 has the first half of KV head 1, whose queries are 8 on.
    assert dimensions(heads, 1, 128, paired=True) == [*range(32, 64), *range(96, 128)]
    assert dimensions(heads, 2, 128, paired=False) == list(range(8 * 128, 8 * 128 + 64))


@given(st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(2, 6), st.integers(1, 5)), st.booleans())
def test_every_dimension_of_every_head_is_on_one_rank_and_rotary_pairs_stay_together(
    counts: tuple[int, int, int, int], paired: bool
) -> None:
    ratio, num_kv, parts, pairs = counts
    size = 2 * parts * pairs
    heads = split_inside(ratio * num_kv, num_kv, size, num_kv * parts)
    held: Counter[int] = Counter()
    for rank in range(heads.tp):
        for head in heads.q_heads[rank * heads.q_local : (rank + 1) * heads.q_local]:
            rows = [at for block in head_slice(0, head, size, heads, rank, paired)
                    for at in range(block.start, block.start + block.rows)]  # fmt: skip
            assert len(rows) == heads.slice_of(size)
            if paired:  # the second half of what a rank has are the partners of the first
                assert [at + size // 2 for at in rows[: len(rows) // 2]] == rows[len(rows) // 2 :]
            held.update(rows)
    assert held == Counter(range(ratio * num_kv * size))


def test_no_more_ranks_than_kv_heads_are_dealt_whole_heads_as_ever() -> None:
    for tp, cp in ((1, 1), (2, 2), (3, 1)):
        plan = Plan(MeshSpec(cp=cp, tp=tp), kv_split="head_dim")
        assert heads_of(CONFIG, plan) == split_heads(9, 3, tp)
        if cp == 1:
            assert chosen(Step(CONFIG, plan, "decode", 1, 1, 16))["decode_attention"].name == "local"


@pytest.mark.parametrize(
    ("mesh", "config", "said"),
    [
        ("tp=4", CONFIG, "gives as many ranks to each of 3 KV heads, which tp=4 does not: use tp=3 or tp=6, or kv_sp"),
        ("tp=9", CONFIG, "shares the 4 rotary pairs of a head evenly, which tp=9 with 3 ranks for each of 3 KV heads"),
        ("cp=2,tp=6", CONFIG, "splits 3 KV heads over tp=6 and cannot run with cp=2, which splits keys by positions: "),
        ("tp=2", LATENT, "splits KV heads, and a qwen3 caches latents that serve all heads: leave it out"),
    ],
)
def test_heads_that_cannot_be_split_inside_are_refused_with_the_numbers(mesh: str, config: Any, said: str) -> None:
    plan = Plan(MeshSpec.parse(mesh), kv_split="head_dim")
    with pytest.raises(PlanError, match=f"^kv_split='head_dim' {said}"):
        Programs(config, plan, abstract_mesh(plan.mesh))


def test_an_unknown_way_and_a_strategy_without_its_heads_and_training_are_refused() -> None:
    with pytest.raises(PlanError, match=r"^kv_split='rows' is unknown: use replicate or head_dim$"):
        Plan(kv_split="rows")
    alone = Plan(MeshSpec(cp=2), decode_attention="head_dim")
    with pytest.raises(
        PlanError, match=r"^attention 'head_dim' is for KV heads that tp splits inside, and kv_split='r"
    ):
        chosen(Step(CONFIG, alone, "decode", 1, 1, 16))
    spec = MeshSpec(tp=6)
    plan, mesh = Plan(spec, kv_split="head_dim"), make_mesh(spec, ensure_devices(spec))
    with pytest.raises(PlanError, match=r"^kv_split='head_dim': training keeps heads whole; leave it out$"):
        TrainPrograms(replace(CONFIG, sinks=False), plan, mesh, TrainSettings(1, 2, 4, 0.1, 0, 1))


# The answers


def assert_is_the_oracle(name: str, mesh: str, **plan: Any) -> None:
    oracle, runner = load_oracle(name), oracle_runner(name, mesh, kv_split="head_dim", **plan)
    assert "head_dim" in {strategy.name for strategy in chosen(a_step(runner.config, mesh, "decode")).values()}
    assert_logits(runner, oracle.prompts, oracle.logits)
    assert_tokens(runner, oracle.prompts, oracle.greedy)


@pytest.mark.usefixtures("unwritten_pages_are_nan")
@pytest.mark.parametrize(("name", "mesh"), ORACLES)
def test_heads_split_inside_give_the_logits_and_tokens_of_transformers_on_every_rank(name: str, mesh: str) -> None:
    assert_is_the_oracle(name, mesh, page_size=17)


@pytest.mark.usefixtures("unwritten_pages_are_nan")
def test_so_they_do_in_chunks_with_a_window_and_with_a_split_residual() -> None:
    assert_is_the_oracle("qwen2_sliding", "dp=2,tp=4", chunk=8, page_size=17, sequence_parallel=True)


@pytest.mark.full
@pytest.mark.usefixtures("unwritten_pages_are_nan")
@pytest.mark.parametrize(("name", "mesh"), MORE)
def test_heads_split_inside_give_the_logits_and_tokens_of_transformers_elsewhere(name: str, mesh: str) -> None:
    assert_is_the_oracle(name, mesh, chunk=8, page_size=5, two_batch_overlap=name == "qwen2_sliding")


def softmax(q: np.ndarray, k: np.ndarray, v: np.ndarray, sinks: np.ndarray, window: int) -> np.ndarray:
    """[B, T, H, d] by the definition, in float64: each of the last T tokens over those in its window."""
    tokens, keys = q.shape[1], k.shape[2]
    k, v = (np.repeat(x.astype(float), q.shape[2] // k.shape[0], axis=0) for x in (k, v))
    scores = np.einsum("bthd,hbsd->bhts", q.astype(float), k) * 0.4
    distance = np.arange(keys - tokens, keys)[:, None] - np.arange(keys)[None, :]
    weights = np.exp(np.where((distance >= 0) & (distance < window), scores, -np.inf))
    total = weights.sum(axis=-1) + np.exp(sinks.astype(float))[None, :, None]
    return np.einsum("bhts,hbsd->bthd", weights / total[..., None], v)


@pytest.mark.parametrize("tokens", [1, 7])
def test_keys_in_tiles_give_the_softmax_over_all_of_them_and_the_sink(
    monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    monkeypatch.setattr(head_dim, "SCORES", 1)
    monkeypatch.setattr(head_dim, "FEWEST_KEYS", 4)
    assert head_dim.tiles_of(2 * 5 * tokens, 13) == (4, 4)
    rng, spec = np.random.default_rng(5), MeshSpec(tp=6)
    heads, size = split_inside(10, 2, 12, 6), 12
    k, v = rng.standard_normal((2, 2, 2, 12, size)).astype(np.float32)
    q = rng.standard_normal((2, tokens, 10, size)).astype(np.float32)
    sinks = np.float32([0.5, -1.0, 30.0, -30.0, 2.0] * 2)
    wanted = softmax(q, k, v, sinks, 9)
    # A bag in any order, with an entry that holds no key.
    order = rng.permutation(12)
    positions = np.insert(order, 3, -1).astype(np.int32)

    def of_rank(rank: int) -> dict[str, np.ndarray]:
        head, mine = heads.kv_heads[rank], np.arange(size).reshape(2, heads.parts, -1)[:, rank % heads.parts].ravel()
        bag = {"k": k[head : head + 1][..., order, :][..., mine], "v": v[head : head + 1][..., order, :][..., mine]}
        padded = {name: np.insert(plane, 3, np.nan, axis=2) for name, plane in bag.items()}
        queries = slice(head * heads.group, (head + 1) * heads.group)
        return padded | {"q": q[:, :, queries][..., mine], "sinks": sinks[queries]}

    ranks = [of_rank(rank) for rank in range(6)]
    stacked = {name: np.stack([rank[name] for rank in ranks]) for name in ranks[0]}

    def local(arrays: dict[str, jax.Array]) -> jax.Array:
        x = {name: array[0] for name, array in arrays.items()}
        at = np.broadcast_to(np.arange(12 - tokens, 12, dtype=np.int32), (2, tokens))
        bag, held = (x["k"], x["v"]), np.broadcast_to(positions, (2, 13))
        inputs = Inputs(x["q"], bag, jax.numpy.asarray(at), jax.numpy.asarray(held), 9, 0.4, heads.group, x["sinks"],
                        groups=heads.groups)  # fmt: skip
        return head_dim.run(inputs, Plan(spec), None)[None]

    program = jax.shard_map(local, mesh=make_mesh(spec, ensure_devices(spec)), in_specs=P("tp"), out_specs=P("tp"))
    out = np.asarray(jax.jit(program)(stacked))
    for rank in range(6):
        mine = np.arange(size).reshape(2, heads.parts, -1)[:, rank % heads.parts].ravel()
        head = heads.kv_heads[rank]
        expected = wanted[:, :, head * heads.group : (head + 1) * heads.group][..., mine]
        np.testing.assert_allclose(out[rank], expected, atol=2e-6, err_msg=f"rank {rank}")


# What it costs


def a_step(config: Any, mesh: str, phase: Phase, **fields: Any) -> Step:
    plan = Plan(MeshSpec.parse(mesh), page_size=4, kv_split="head_dim", **fields)
    return Step(config, plan, phase, lanes=2, tokens=1 if phase == "decode" else 5, keys=12)


@pytest.mark.parametrize("phase", PHASES)
def test_bytes_calls_and_flops_of_keys_in_several_tiles_are_the_traced_ones(
    monkeypatch: pytest.MonkeyPatch, phase: Phase
) -> None:
    # 3 tiles of 4 keys; three ranks of a head do not divide them.
    monkeypatch.setattr(head_dim, "SCORES", 1)
    monkeypatch.setattr(head_dim, "FEWEST_KEYS", 5)
    step = a_step(replace(CONFIG, head_dim=12), "dp=2,tp=9", phase, dtype="bfloat16")
    programs = Programs(step.config, step.plan, abstract_mesh(step.plan.mesh))
    jaxpr = jax.make_jaxpr(programs.spmd(phase))(*programs.abstract_arguments(step, pages=8))
    traced = trace_traffic(jaxpr, step.plan.mesh.sizes)
    assert compare(predict_traffic(step), traced) == []
    assert {row.sublayer: row.flops for row in trace_flops(jaxpr)} == predict_flops(step)
    assert uniform_control_violations(jaxpr, step.plan.mesh.sizes) == []
    scores = [row for row in traced if row.sublayer == f"{phase}_attention" and row.collective == "reduce_scatter"]
    # Of scores in three tiles, filled up to six keys, and of the squares of three query heads and a KV head.
    rows = step.rows
    assert sorted((row.calls, row.message_bytes) for row in scores) == [
        (3, 4 * 4 * -(-rows // 3) * 3),
        (9, 4 * 3 * rows * 6),
    ]


def test_decode_of_llama_3_70b_at_tp_16_sends_the_scores_of_eight_queries_over_pairs_of_ranks() -> None:
    config = read_config(model_dir("llama-3-70b"))
    plan = Plan(MeshSpec(tp=16), dtype="bfloat16", kv_split="head_dim")
    step = Step(config, plan, "decode", lanes=64, tokens=1, keys=4096)
    # 64 requests x 8 queries x 4096 keys x 4 bytes = 8 MiB: of two ranks each sends half, and half of the sums.
    assert chosen(step)["decode_attention"].traffic(step) == [
        Traffic("decode_attention", "head_dim", "reduce_scatter", ("tp",), 80, 8 * MIB, 80 * 4 * MIB, ranks=2),
        Traffic("decode_attention", "head_dim", "all_gather", ("tp",), 80, 4 * MIB, 80 * 4 * MIB, ranks=2),
    ]
    # Half of a KV head of 128 dimensions in keys and in values, of 64 requests of 4096 keys, 2 bytes each.
    assert step.bag_bytes == [64 * 4096 * 64 * 2] * 2


def test_a_rank_has_a_bounded_part_of_the_scores_until_a_tile_has_128_keys() -> None:
    for rows, keys in itertools.product((8, 512, 32768, 262144), (16, 4096, 131072)):
        number, length = head_dim.tiles_of(rows, keys)
        assert number * length >= keys > (number - 1) * length
        assert rows * length <= max(head_dim.SCORES, rows * 128)


def test_a_model_saved_from_split_heads_would_be_the_one_that_was_read(tmp_path: Any) -> None:
    from jaxpar.checkpoint.save import collect_tensors

    model = write_model(tmp_path / "model", num_attention_heads=6, num_key_value_heads=2)
    whole, split = (
        jaxpar.load(model, mesh=mesh, kv_split=kind) for mesh, kind in (("tp=1", "replicate"), ("tp=8", "head_dim"))
    )
    expected, found = (collect_tensors(runner.programs.weights, runner.weights) for runner in (whole, split))
    assert SMALL["head_dim"] == 8 and expected.keys() == found.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name], tensor)
