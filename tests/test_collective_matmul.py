"""Products that gather their rows and scatter their sums as they go: what they give and send, what may overlap."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from oracle_checks import assert_logits, assert_tokens
from oracle_data import load_oracle
from sample_models import oracle_runner
from test_overlap import EXPERTS, ancestors, body, is_product, needs
from test_registry import CONFIG, LATENT

from jaxpar.checkpoint.config import ModelConfig
from jaxpar.collectives.matmul import gather_matmul, matmul_scatter
from jaxpar.devices import ensure_devices, make_mesh
from jaxpar.ledger.predict import predict_flops, predict_traffic
from jaxpar.ledger.walk import equations, scopes_of
from jaxpar.mesh import MeshSpec
from jaxpar.plan import Plan, SublayerName
from jaxpar.program import compiler_options
from jaxpar.strategies import Step

RING: dict[str, Any] = {"sequence_parallel": True, "collective_matmul": True}
MESHES = ["dp=2,tp=4", "dp=4,tp=2"]
SUBLAYERS: tuple[SublayerName, ...] = ("attention", "mla", "ffn", "moe", "vocabulary")
WIDTH, OUT = 6, 10


def rows_of(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    """Small whole numbers: their products and sums are exact in any order."""
    return np.random.default_rng(sum(shape)).integers(-4, 5, shape).astype(dtype)


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.matmul(x, w, preferred_element_type=jnp.float32)


def gathered(mesh: str, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """What every rank has of `rows` of each times its weights, and what it should [dp, tp, tp * rows, OUT]."""
    spec = MeshSpec.parse(mesh)
    x, w = rows_of(spec.dp, spec.tp, rows, WIDTH), rows_of(spec.tp, WIDTH, OUT)

    def local(x: jax.Array, w: jax.Array) -> jax.Array:
        return gather_matmul(x[0, 0], ("tp",), lambda rows: product(rows, w[0]), "ffn")[None, None]

    devices = make_mesh(spec, ensure_devices(spec))
    program = jax.shard_map(local, mesh=devices, in_specs=(P("dp", "tp"), P("tp")), out_specs=P("dp", "tp"))
    return np.asarray(jax.jit(program)(x, w)), x.reshape(spec.dp, 1, -1, WIDTH) @ w[None]


def scattered(mesh: str, rows: int, dtype: Any = np.float32) -> tuple[np.ndarray, np.ndarray]:
    """What every rank has of the sum of all ranks' products, and what it should [dp, tp, ceil(rows / tp), OUT]."""
    spec = MeshSpec.parse(mesh)
    x, w = rows_of(spec.dp, spec.tp, rows, WIDTH, dtype=dtype), rows_of(spec.tp, WIDTH, OUT, dtype=dtype)

    def local(x: jax.Array, w: jax.Array) -> jax.Array:
        return matmul_scatter(x[0, 0], ("tp",), lambda rows: product(rows, w[0]), "ffn")[None, None]

    devices = make_mesh(spec, ensure_devices(spec))
    program = jax.shard_map(local, mesh=devices, in_specs=(P("dp", "tp"), P("tp")), out_specs=P("dp", "tp"))
    expected = np.einsum("dtri,tio->dro", x.astype(np.float32), w.astype(np.float32))
    padded = np.pad(expected, ((0, 0), (0, -rows % spec.tp), (0, 0)))
    return np.asarray(jax.jit(program)(x, w)), padded.reshape(spec.dp, spec.tp, -1, OUT)


# Values


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 128])
@pytest.mark.parametrize("mesh", MESHES)
def test_every_rank_has_the_product_of_all_ranks_rows_in_their_order(mesh: str, rows: int) -> None:
    np.testing.assert_array_equal(*gathered(mesh, rows))


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 128])
@pytest.mark.parametrize("mesh", MESHES)
def test_every_rank_has_its_slice_of_the_sum_of_all_ranks_products(mesh: str, rows: int) -> None:
    np.testing.assert_array_equal(*scattered(mesh, rows))


@settings(max_examples=6)
@given(st.integers(1, 2), st.integers(2, 4), st.integers(1, 9))
def test_any_number_of_rows_on_any_number_of_ranks_is_x_times_w(dp: int, tp: int, rows: int) -> None:
    np.testing.assert_array_equal(*gathered(f"dp={dp},tp={tp}".replace("dp=1,", ""), rows))
    np.testing.assert_array_equal(*scattered(f"dp={dp},tp={tp}".replace("dp=1,", ""), rows))


def test_sums_of_16_bits_are_sent_in_16_bits() -> None:
    found, expected = scattered("dp=2,tp=4", 7, jnp.bfloat16)
    assert found.dtype == jnp.bfloat16
    # Three roundings on the way, and one at the end: each is off by 2^-9 of a sum at most, which is below 4 * 6 * 16.
    np.testing.assert_allclose(found.astype(np.float32), expected, rtol=0, atol=4 * 384 / 512)


# Models


MODELS: list[Any] = [
    ("qwen2_sliding", "dp=2,tp=4", {}),
    ("llama_9_3", "tp=3", {}),
    ("mistral", "cp=2,tp=4", {"decode_attention": "helix"}),
    ("deepseek_v2_dense", "tp=2", {}),
    *(
        pytest.param(*model, marks=pytest.mark.full)
        for model in (
            ("qwen2_sliding", "dp=4,tp=2", {}),
            ("qwen3", "tp=8", {}),
            ("qwen3_moe_dense", "ep=2,tp=2", {"experts_over": "ep,tp"}),
            ("deepseek_v3", "ep=2,tp=2", {"experts_over": "ep,tp"}),
            ("deepseek_v2_dense", "dp=2,tp=3", {}),
            ("mistral", "dp=2,cp=2,tp=2", {"two_batch_overlap": True}),
            ("gpt_oss", "dp=2,ep=2,tp=2", {}),
        )
    ),
]


@pytest.mark.usefixtures("unwritten_pages_are_nan")
@pytest.mark.parametrize(("name", "mesh", "plan"), MODELS)
def test_every_rank_has_the_logits_and_tokens_of_transformers(name: str, mesh: str, plan: dict[str, Any]) -> None:
    oracle, runner = load_oracle(name), oracle_runner(name, mesh, page_size=17, **RING, **plan)
    assert_logits(runner, oracle.prompts, oracle.logits)
    assert_tokens(runner, oracle.prompts, oracle.greedy)


@pytest.mark.usefixtures("unwritten_pages_are_nan")
@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_so_it_is_of_fewer_tokens_than_ranks(tokens: int) -> None:
    oracle, runner = load_oracle("qwen2_sliding"), oracle_runner("qwen2_sliding", "tp=4", chunk=tokens, **RING)
    assert_logits(runner, [oracle.prompts[0][:tokens]], [oracle.logits[0][:tokens]])


# What a step's program says


def loops(eqns: list[Any]) -> list[Any]:
    """The rings of a step, in order."""
    return [eqn for eqn in eqns if eqn.primitive.name == "scan" and ":collective_matmul" in scopes_of(eqn, "")]


@pytest.mark.parametrize(("tp", "ways"), [(4, 2), (8, 1)])
def test_no_product_waits_for_what_is_sent_in_its_step_and_both_ways_are_under_way_at_once(tp: int, ways: int) -> None:
    plan = Plan(MeshSpec(tp=tp), page_size=4, **RING)
    rings = loops(body(plan, phase="prefill", lanes=1))  # five tokens: two on each of four ranks, one on each of eight
    assert len(rings) == 4  # into and out of attention and the FFN
    for ring in rings:
        assert ring.params["length"] == tp - 1
        eqns = equations(ring.params["jaxpr"])
        before = ancestors(eqns)
        products = {number for number, eqn in enumerate(eqns) if is_product(eqn)}
        hops = {number for number, eqn in enumerate(eqns) if eqn.primitive.name == "ppermute"}
        assert (len(products), len(hops)) == (1, ways)
        # A half that no rank has any row of is not sent. The other way round is the inverse permutation.
        assert len({tuple(sorted(eqns[number].params["perm"])) for number in hops}) == ways
        assert not needs(before, products, hops)
        assert not needs(before, hops, products)
        assert not needs(before, hops, hops)


@pytest.mark.parametrize("tokens", [1, 5, 8])
@pytest.mark.parametrize(("config", "mesh"), [(CONFIG, "tp=4"), (LATENT, "dp=2,tp=4"), (CONFIG, "cp=2,tp=4")])
def test_as_many_bytes_are_sent_as_by_gathers_and_reduce_scatters(config: ModelConfig, mesh: str, tokens: int) -> None:
    plan = Plan(MeshSpec.parse(mesh), sequence_parallel=True)
    plain = Step(config, plan, "prefill", 1, tokens, keys=16)
    ring = replace(plain, plan=replace(plan, collective_matmul=True))
    sent = [sum(row.sent_bytes for row in predict_traffic(step)) for step in (plain, ring)]
    assert sent[0] == sent[1]
    assert any(row.collective == "ppermute" for row in predict_traffic(ring))


def test_only_rows_that_fill_the_last_slice_up_are_multiplied_besides() -> None:
    plan = Plan(MeshSpec(tp=4), sequence_parallel=True)
    for rows in (8, 5):
        plain, ring = (
            predict_flops(Step(CONFIG, one, "prefill", lanes=1, tokens=rows, keys=16))
            for one in (plan, replace(plan, collective_matmul=True))
        )
        for sublayer in ("attention", "ffn"):
            assert ring[sublayer] * rows == plain[sublayer] * 8


def test_experts_latents_and_all_of_decode_come_and_go_as_without_it() -> None:
    plain, ring = (Plan(MeshSpec(ep=2, tp=2), **fields) for fields in ({"sequence_parallel": True}, RING))
    assert ring.sublayer("moe", "prefill") == plain.sublayer("moe", "prefill")
    assert ring.sublayer("mla", "prefill").gather == plain.sublayer("mla", "prefill").gather == ("tp",)
    assert ring.sublayer("mla", "prefill").ring_out == ring.sublayer("attention", "prefill").ring_in == ("tp",)
    for name in SUBLAYERS:
        assert ring.sublayer(name, "decode") == plain.sublayer(name, "decode")
    scopes = [scopes_of(eqn, "") for eqn in loops(body(ring, EXPERTS, "prefill"))]
    assert len(scopes) == 2 * EXPERTS.num_hidden_layers
    assert all("attention:collective_matmul" in scope for scope in scopes)


def test_over_one_rank_a_product_is_a_product() -> None:
    assert loops(body(Plan(MeshSpec(dp=2), **RING), phase="prefill")) == []


def test_a_gpu_is_told_that_two_collectives_may_be_under_way() -> None:
    (limit,) = (compiler_options("cuda", Plan(**RING)) or {}).values()
    assert limit == "2"
    assert compiler_options("cpu", Plan(**RING)) is compiler_options("cuda", Plan()) is None


def test_layers_share_code_in_programs_for_tpus_whatever_the_plan() -> None:
    for plan in (Plan(), Plan(**RING)):
        assert (compiler_options("tpu", plan) or {})["xla_tpu_enable_deduplicated_calls"] == "true"
