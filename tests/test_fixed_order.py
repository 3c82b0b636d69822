"""Under `all_reduce="fixed_order"` a request's bits do not depend on the others of a step, nor on its lane."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from oracle_checks import assert_logits, assert_tokens
from oracle_data import load_oracle
from sample_models import GREEDY, open_session, oracle_runner, write_model

import jaxpar
from jaxpar.attention.tiles import attend
from jaxpar.checkpoint import open_checkpoint
from jaxpar.collectives.fixed_order import FIXED_ORDER
from jaxpar.devices import ensure_devices, make_mesh
from jaxpar.engine.requests import SamplingParams
from jaxpar.engine.session import Decoded, Session
from jaxpar.errors import PlanError
from jaxpar.fixed import ROWS, in_tiles
from jaxpar.kernels.dense import matmul
from jaxpar.mesh import MeshSpec
from jaxpar.moe.aligned import aligned_expert_ffn, aligned_rows
from jaxpar.moe.grouped import expert_ffn
from jaxpar.nn.mlp import gated
from jaxpar.plan import Plan
from jaxpar.program import Programs
from jaxpar.runner import Runner

FIXED: dict[str, Any] = {"all_reduce": "fixed_order"}
RNG = np.random.default_rng(0)
MINE = RNG.integers(0, 50, 19).tolist()
SHORTER, LONGER = RNG.integers(0, 50, 3).tolist(), RNG.integers(0, 50, 40).tolist()
OTHERS = [RNG.integers(0, 50, length).tolist() for length in (1, 19, 33, 8, 20, 5, 12)]
FOLLOWING = RNG.integers(0, 50, 2).tolist()
DRAWN = SamplingParams(temperature=0.9, top_p=0.8, top_k=40, seed=5, ignore_eos=True)


def bits(runner: Runner, others: Sequence[list[int]], place: int, whole: bool) -> list[np.ndarray]:
    """What comes of MINE with `place` requests before it, and the rest of `others` behind.

    Logits of the prompt and log-probabilities after the tokens FOLLOWING it; if `whole` also drawn tokens, the
    log-probability of the one after the prompt, and logits of those that follow.
    """
    prompts = [*others[:place], MINE, *others[place:]]

    def sampled(decoded: Decoded) -> list[np.ndarray]:
        return [np.asarray(values)[decoded.rows[place]] for values in (decoded.output.token, decoded.output.logprob)]

    def following(session: Session, logits: bool = False) -> Iterator[Decoded]:
        for token in FOLLOWING:
            # With stages a step has a group of the requests.
            for decoded in session.decode(dict.fromkeys(range(len(prompts)), token), logits):
                if place in decoded.rows:
                    yield decoded

    session = open_session(runner, prompts, len(FOLLOWING), DRAWN if whole else GREEDY)
    chunks = list(session.prefill(logits=True))
    found = [np.asarray(chunk.output.logits)[chunk.rows[place], chunk.columns[place]] for chunk in chunks]
    found += [value for decoded in following(session) for value in sampled(decoded)]
    if whole:
        session = open_session(runner, prompts, len(FOLLOWING), DRAWN)
        for chunk in session.prefill():
            found += sampled(chunk.decoded) if place in chunk.ended else []
        found += [np.asarray(decoded.output.logits)[decoded.rows[place]] for decoded in following(session, logits=True)]
    return found


def assert_same(runner: Runner, batches: Sequence[tuple[Sequence[list[int]], int]], whole: bool = True) -> None:
    """Alone MINE has the same bits as in each batch."""
    alone = bits(runner, [], 0, whole)
    for others, place in batches:
        # Chunks are as many as the longest prompt has; of MINE the last ones have no token.
        in_batch = [part for part in bits(runner, others, place, whole) if part.size]
        jax.tree.map(np.testing.assert_array_equal, in_batch, alone)


def test_a_request_has_the_same_bits_alone_and_in_any_lane_of_any_batch_every_time(tmp_path: Path) -> None:
    runner = jaxpar.load(write_model(tmp_path, num_attention_heads=9, num_key_value_heads=3), "tp=2", **FIXED)
    of_three, of_eight = [SHORTER, LONGER], [*OTHERS[:5], LONGER, SHORTER]
    assert_same(runner, [(of_three, 0), (of_three, 1), (of_three, 2), ([], 0)])
    assert_same(runner, [(of_eight, 0), (of_eight, 3), (of_eight, 7)], whole=False)


def test_the_backends_own_sums_and_products_give_other_bits_in_a_batch(tmp_path: Path) -> None:
    runner = jaxpar.load(write_model(tmp_path, num_attention_heads=9, num_key_value_heads=3), "tp=2")
    with pytest.raises(AssertionError, match="Mismatched elements"):
        assert_same(runner, [([SHORTER, LONGER], 1)], whole=False)


@pytest.mark.parametrize(
    ("name", "mesh", "plan"),
    [
        pytest.param("qwen3", "cp=2,tp=2", {"dtype": "bfloat16", "sequence_parallel": True}, marks=pytest.mark.full),
        ("deepseek_v2", "dp=2,tp=2", {"experts_over": "dp,tp"}),
    ],
)
def test_neighbours_do_not_change_a_bit(name: str, mesh: str, plan: dict[str, Any]) -> None:
    assert_same(oracle_runner(name, mesh, **FIXED, **plan), [([SHORTER, LONGER], 1)], whole=False)


@pytest.mark.full
def test_a_fixed_order_gives_the_logits_of_transformers() -> None:
    oracle = load_oracle("deepseek_v2")
    assert_logits(
        oracle_runner("deepseek_v2", "dp=2,tp=2", **FIXED, experts_over="dp,tp"), oracle.prompts, oracle.logits
    )


MODELS = ("llama_9_3", "qwen2_sliding", "qwen3", "gpt_oss", "deepseek_v3", "qwen3_moe")
MESHES = ("tp=1", "tp=2", "tp=3", "tp=4", "dp=2,tp=2", "cp=2", "pp=2")
# Each mesh with two of the models, in the one and in the other dtype.
ON_MESHES = [
    (MODELS[(i + 3 * turn) % len(MODELS)], mesh, dtype)
    for turn, dtype in enumerate(("float32", "bfloat16"))
    for i, mesh in enumerate(MESHES)
]


@pytest.mark.full
@pytest.mark.parametrize(("name", "mesh", "dtype"), ON_MESHES)
def test_neighbours_do_not_change_a_bit_of_any_model_and_on_any_mesh_in_chunks(
    name: str, mesh: str, dtype: str
) -> None:
    runner = oracle_runner(name, mesh, **FIXED, dtype=dtype, chunk=16)
    assert_same(runner, [([SHORTER, LONGER], 1), ([*OTHERS, LONGER], 6)])


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_a_fixed_order_gives_the_logits_and_tokens_of_transformers(name: str) -> None:
    oracle, runner = load_oracle(name), oracle_runner(name, "dp=2,tp=2", **FIXED)
    assert_logits(runner, oracle.prompts, oracle.logits)
    assert_tokens(runner, oracle.prompts, oracle.greedy)


# What it is made of


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_of_a_product_has_the_same_bits_among_any_number_of_rows_and_in_any_place(dtype: str) -> None:
    x, w = (jnp.asarray(RNG.standard_normal(shape), dtype) for shape in ((40, 72), (101, 72)))
    product = jax.jit(lambda x: matmul(x, w, fixed=True))
    alone = np.concatenate([product(x[i : i + 1]) for i in range(len(x))])
    for rows in (2, 3, ROWS, ROWS + 1, len(x)):
        np.testing.assert_array_equal(product(x[:rows]), alone[:rows])
        np.testing.assert_array_equal(product(x[:rows][::-1]), alone[:rows][::-1])


def test_tiles_make_of_rows_what_all_rows_at_once_are_made_of() -> None:
    x, y = jnp.arange(11.0), jnp.arange(22.0).reshape(11, 2)
    found = in_tiles(lambda x, y: {"sum": x[:, None] + y, "first": x}, x, y)
    np.testing.assert_array_equal(found["sum"], x[:, None] + y)
    np.testing.assert_array_equal(found["first"], x)


@pytest.mark.parametrize("shape", [(1, 5), (2, 7), (3, 128)])
def test_sums_over_ranks_are_added_in_rank_order_in_float32_and_rounded_once(shape: tuple[int, int]) -> None:
    parts = (RNG.standard_normal((4, 4 * shape[0], shape[1])) * 10.0 ** RNG.integers(-3, 9, (4, 1, 1))).astype("f4")
    parts = np.asarray(jnp.asarray(parts, jnp.bfloat16))
    mesh = make_mesh(MeshSpec(tp=4), ensure_devices(MeshSpec(tp=4), "cpu"))

    def reduced(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return FIXED_ORDER.all_reduce(x[0], ("tp",)), FIXED_ORDER.reduce_scatter(x[0], ("tp",))

    program = jax.jit(jax.shard_map(reduced, mesh=mesh, in_specs=P("tp"), out_specs=(P(), P("tp"))))
    wide = parts.astype(np.float32)
    expected = (((wide[0] + wide[1]) + wide[2]) + wide[3]).astype(parts.dtype)
    for found in program(parts):
        np.testing.assert_array_equal(found, expected)


def attended(lanes: int, lane: int, queries: int, keys: int) -> np.ndarray:
    """Attention of a request of 11 tokens in a lane among others of as many queries and keys as there is room for."""
    mine, others = np.random.default_rng(1), np.random.default_rng(2)
    arrays = []
    for length, *rest in ((queries, 3, 8), (keys, 8), (keys, 8)):
        own = mine.standard_normal((2, 1, 160, *rest))[:, :, :length]
        array = others.standard_normal((2, lanes, length, *rest))
        array[:, lane] = own[:, 0]
        arrays.append(array)
    q_at, k_at = (np.tile(np.arange(length), (lanes, 1)) for length in (queries, keys))
    for at in (q_at, k_at):
        at[lane, 11:] = -1
    positions = (x.astype(np.int32) for x in (q_at, k_at))
    part = attend(*(jnp.asarray(x, jnp.float32) for x in arrays), *positions, 7, 0.3, fixed="prefill")
    return np.asarray(part.out)[:, lane, :11]


@pytest.mark.parametrize(("lanes", "lane", "queries", "keys"), [(3, 1, 16, 16), (2, 0, 64, 160)])
def test_attention_has_the_same_bits_in_any_lane_and_with_any_room_for_queries_and_keys(
    lanes: int, lane: int, queries: int, keys: int
) -> None:
    np.testing.assert_array_equal(attended(lanes, lane, queries, keys), attended(1, 0, 11, 11))


def test_experts_give_a_row_the_same_bits_however_many_rows_they_have() -> None:
    gate_up, down, bias = (RNG.standard_normal(shape).astype("f4") for shape in ((3, 20, 12), (3, 12, 10), (3, 20)))
    rows = RNG.standard_normal((30, 12)).astype(np.float32)
    ffn = jax.jit(lambda rows, counts: aligned_expert_ffn(rows, gate_up, down, counts, gated, bias))
    counts = np.array([11, 0, 17], np.int32)
    every = ffn(rows, counts)
    grouped = expert_ffn(*map(jnp.asarray, (rows, gate_up, down, counts)), gated, jnp.asarray(bias))
    np.testing.assert_allclose(every, grouped, rtol=0, atol=1e-4)
    assert not np.asarray(every)[28:].any()
    np.testing.assert_array_equal(ffn(rows[9:13], np.array([2, 0, 2], np.int32)), every[9:13])


@given(st.lists(st.integers(0, 40), min_size=1, max_size=9))
def test_the_tiles_of_experts_hold_any_rows_and_are_all_needed_for_some(counts: list[int]) -> None:
    def needed(counts: list[int]) -> int:
        return sum(-(-count // ROWS) * ROWS for count in counts)

    rows, experts = sum(counts), len(counts)
    assert needed(counts) <= aligned_rows(rows, experts)
    worst = [max(rows - experts + 1, 0), *[1] * (min(rows, experts) - 1)] if rows >= experts else [1] * rows
    assert needed(worst) == aligned_rows(rows, experts)


# What cannot be


@pytest.mark.parametrize(
    ("name", "mesh", "plan", "said"),
    [
        ("qwen3", "cp=2", {"prefill_attention": "ulysses"}, r"prefill_attention='ulysses' adds .*: use auto or ring$"),
        ("qwen3", "cp=2", {"decode_attention": "ag_rs"}, r"decode_attention='ag_rs' adds .*: use auto or q_repl"),
        ("qwen3_moe", "ep=2", {"moe_dispatch": "all_to_all"}, r"moe_dispatch='all_to_all' adds .* auto or standard$"),
        (
            "qwen3_moe",
            "ep=2",
            {"expert_slots": 10},
            r"expert_slots=10 picks copies of experts by lane, .*leave it out$",
        ),
        ("qwen3", "tp=2", {"sequence_parallel": True, "collective_matmul": True}, r"collective_matmul=True .*out$"),
        ("qwen3", "tp=2", {"two_batch_overlap": True}, r"two_batch_overlap=True cuts prompts where .*: leave it out$"),
    ],
)
def test_what_depends_on_other_requests_is_refused_with_the_remedy(
    name: str, mesh: str, plan: dict[str, Any], said: str
) -> None:
    spec, config = MeshSpec.parse(mesh), open_checkpoint(load_oracle(name).dir).config
    with pytest.raises(PlanError, match=f"^{said}"):
        Programs(config, Plan(spec, **FIXED, **plan), make_mesh(spec, ensure_devices(spec, "cpu")))
