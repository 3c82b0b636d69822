"""Tokens choose their experts as formats of every architecture have it, on any rank, and ties go to the lowest one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from oracle_data import ROOT

from jaxpar.checkpoint import RouterConfig, read_config
from jaxpar.devices import abstract_mesh, ensure_devices, make_mesh
from jaxpar.mesh import MeshSpec
from jaxpar.moe.router import Routing, route
from jaxpar.plan import Plan
from jaxpar.program import Programs

EXPERTS, HIDDEN, TOKENS = 12, 10, 40
MIXTRAL = RouterConfig(2, norm_topk_prob=True)
QWEN3 = RouterConfig(4)
GPT_OSS = RouterConfig(3, norm_topk_prob=True, bias="logits")
DEEPSEEK_V2 = RouterConfig(3, routed_scaling_factor=1.5, n_group=4, topk_group=2)
DEEPSEEK_V3 = RouterConfig(
    4,
    scoring="sigmoid",
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    n_group=4,
    topk_group=2,
    group_score="top2_sum",
    bias="choice",
)
V3_PLAIN = RouterConfig(4, scoring="sigmoid", bias="choice")
KINDS = {
    "mixtral": MIXTRAL,
    "qwen3_moe": QWEN3,
    "gpt_oss": GPT_OSS,
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v3": DEEPSEEK_V3,
    "sigmoid without groups": V3_PLAIN,
}


def drawn(seed: int, router: RouterConfig) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Tokens, a router's weight and its bias."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((TOKENS, HIDDEN))
    weight = rng.standard_normal((EXPERTS, HIDDEN)) / HIDDEN**0.5
    bias = rng.standard_normal(EXPERTS) * 0.5 if router.bias else None
    return x, weight, bias


def reference(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, router: RouterConfig) -> Routing:
    """The same, token by token in float64."""
    experts, weights, all_scores = [], [], []
    for token in x.astype(np.float64):
        logits = weight.astype(np.float64) @ token
        if router.bias == "logits":
            logits = logits + bias
        if router.scoring == "softmax":
            scores = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        else:
            scores = 1 / (1 + np.exp(-logits))
        choice = scores + bias if router.bias == "choice" else scores
        groups = np.arange(len(choice)).reshape(router.n_group, -1)
        best = 1 if router.group_score == "max" else 2
        of_group = [np.sort(choice[group])[-best:].sum() for group in groups]
        kept = sorted(range(router.n_group), key=lambda group: (-of_group[group], group))[: router.topk_group]
        allowed = groups[kept].ravel()
        chosen = sorted(allowed, key=lambda expert: (-choice[expert], expert))[: router.top_k]
        chosen_scores = scores[chosen]
        if router.norm_topk_prob:
            chosen_scores = chosen_scores / (chosen_scores.sum() + 1e-20)
        experts.append(chosen)
        weights.append(chosen_scores * router.routed_scaling_factor)
        all_scores.append(scores)
    return Routing(np.array(experts), np.array(weights), np.array(all_scores))


def routed(x: Any, weight: Any, bias: Any, router: RouterConfig, dtype: Any = jnp.float32) -> Routing:
    arrays = (None if value is None else jnp.asarray(value, dtype) for value in (x, weight, bias))
    return jax.jit(route, static_argnums=3)(*arrays, router)


def by_logits(logits: np.ndarray, bias: np.ndarray | None, router: RouterConfig) -> Routing:
    """Routing of tokens whose logits are these."""
    return routed(logits, np.eye(logits.shape[1]), bias, router)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_router_chooses_and_weighs_as_its_definition_says(kind: str) -> None:
    inputs = drawn(0, KINDS[kind])
    found, expected = routed(*inputs, KINDS[kind]), reference(*inputs, KINDS[kind])
    assert (found.experts.dtype, found.weights.dtype) == (jnp.int32, jnp.float32)
    np.testing.assert_array_equal(found.experts, expected.experts)
    np.testing.assert_allclose(found.weights, expected.weights, rtol=1e-5)
    np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-5)


@given(st.integers(0, 2**32 - 1), st.sampled_from(sorted(KINDS)))
def test_every_token_goes_to_k_different_experts_of_the_best_groups(seed: int, kind: str) -> None:
    router = KINDS[kind]
    found = routed(*drawn(seed, router), router)
    assert all(len(set(row)) == router.top_k for row in np.asarray(found.experts).tolist())
    groups = np.asarray(found.experts) // (EXPERTS // router.n_group)
    assert all(len(set(row)) <= router.topk_group for row in groups.tolist())
    assert (np.asarray(found.weights) > 0).all()
    if router.norm_topk_prob:
        np.testing.assert_allclose(found.weights.sum(1), router.routed_scaling_factor, rtol=1e-5)


@pytest.mark.parametrize("router", [MIXTRAL, GPT_OSS])
def test_renormalised_softmax_scores_are_the_softmax_of_the_chosen_logits(router: RouterConfig) -> None:
    x, weight, bias = drawn(1, router)
    logits = x @ weight.T + (0 if bias is None else bias)
    found = routed(x, weight, bias, router)
    chosen = np.take_along_axis(logits, np.asarray(found.experts), 1)
    np.testing.assert_allclose(found.weights, np.exp(chosen) / np.exp(chosen).sum(1, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_ties_go_to_the_lowest_experts(kind: str) -> None:
    router = KINDS[kind]
    bias = np.zeros(EXPERTS) if router.bias else None
    found = by_logits(np.zeros((3, EXPERTS)), bias, router)
    np.testing.assert_array_equal(found.experts, [range(router.top_k)] * 3)


def test_a_correction_bias_moves_the_choice_and_no_weight() -> None:
    logits = np.linspace(-2, 2, EXPERTS)[None, :]
    bias = np.where(np.arange(EXPERTS) < 4, 1.0, -1.0)
    found = by_logits(logits, bias, V3_PLAIN)
    np.testing.assert_array_equal(found.experts, [[3, 2, 1, 0]])
    np.testing.assert_allclose(found.weights[0], 1 / (1 + np.exp(-logits[0, [3, 2, 1, 0]])), rtol=1e-5)


def test_groups_that_are_not_among_the_best_are_masked_also_where_all_choices_are_negative() -> None:
    # Of expert pairs, group 3 has the best expert and groups 0 and 1 the best sums of two; all are below the masked 0.
    scores = np.array([[0.5, 0.5, 0.4, 0.5, 0.1, 0.1, 0.7, 0.1]])
    router = RouterConfig(3, scoring="sigmoid", n_group=4, topk_group=2, group_score="top2_sum", bias="choice")
    found = by_logits(np.log(scores / (1 - scores)), np.full(8, -5.0), router)
    np.testing.assert_array_equal(found.experts, [[0, 1, 3]])
    np.testing.assert_allclose(found.weights, [[0.5, 0.5, 0.5]], rtol=1e-5)


def test_the_score_of_a_softmax_group_is_its_best_expert() -> None:
    logits = np.log([[0.2, 0.2, 0.25, 0.01, 0.01, 0.01, 0.3, 0.02]])
    router = RouterConfig(2, n_group=4, topk_group=2)
    np.testing.assert_array_equal(by_logits(logits, None, router).experts, [[6, 2]])


def test_an_expert_at_minus_infinity_is_chosen_last_and_weighs_nothing() -> None:
    bias = np.where(np.arange(EXPERTS) == 5, 1.0, -np.inf)
    found = by_logits(np.zeros((1, EXPERTS)), bias, GPT_OSS)
    np.testing.assert_array_equal(found.experts, [[5, 0, 1]])
    np.testing.assert_array_equal(found.weights, [[1, 0, 0]])
    never = by_logits(np.zeros((1, EXPERTS)), np.where(np.arange(EXPERTS) < 8, -np.inf, 0.0), V3_PLAIN)
    np.testing.assert_array_equal(never.experts, [[8, 9, 10, 11]])


def test_scores_that_underflow_leave_no_nan() -> None:
    logits = np.array([[-200.0] * EXPERTS, [200.0, *[-200.0] * (EXPERTS - 1)]])
    found = by_logits(logits, np.zeros(EXPERTS), DEEPSEEK_V3)
    assert np.isfinite(found.weights).all()
    np.testing.assert_array_equal(by_logits(logits, None, MIXTRAL).weights, [[0.5, 0.5], [1.0, 0.0]])


@pytest.mark.parametrize("kind", KINDS)
def test_16_bit_tokens_are_scored_in_float32(kind: str) -> None:
    router = KINDS[kind]
    x, weight, bias = (None if v is None else np.asarray(jnp.asarray(v, jnp.bfloat16)) for v in drawn(2, router))
    found, expected = routed(x, weight, bias, router, jnp.bfloat16), reference(x, weight, bias, router)
    np.testing.assert_array_equal(found.experts, expected.experts)
    np.testing.assert_allclose(found.weights, expected.weights, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_routes_its_tokens_as_one_device_routes_them_all(kind: str) -> None:
    router, spec = KINDS[kind], MeshSpec.parse("dp=2,ep=2,tp=2")
    mesh = make_mesh(spec, ensure_devices(spec))
    x, weight, bias = (None if v is None else jnp.asarray(v, jnp.float32) for v in drawn(3, router))
    tokens = P(("dp", "ep"))
    local = jax.shard_map(lambda x: route(x, weight, bias, router), mesh=mesh, in_specs=tokens, out_specs=tokens)
    found, expected = jax.jit(local)(x), routed(x, weight, bias, router)
    np.testing.assert_array_equal(found.experts, expected.experts)
    np.testing.assert_allclose(found.weights, expected.weights, rtol=1e-6)


def test_no_token_is_no_routing() -> None:
    _, weight, bias = drawn(0, DEEPSEEK_V3)
    found = routed(np.zeros((0, HIDDEN)), weight, bias, DEEPSEEK_V3)
    assert found.experts.shape == found.weights.shape == (0, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_of_the_weights_is_that_of_finite_differences(kind: str) -> None:
    router = KINDS[kind]
    x, weight, bias = (None if v is None else jnp.asarray(v, jnp.float32) for v in drawn(4, router))
    coefficients = jnp.arange(1.0, 1.0 + router.top_k)

    def total(weight: jax.Array) -> jax.Array:
        return (route(x[:3], weight, bias, router).weights * coefficients[None, :]).sum()

    direction = jnp.asarray(np.random.default_rng(5).standard_normal(weight.shape), jnp.float32)
    step = 1e-3
    measured = (total(weight + step * direction) - total(weight - step * direction)) / (2 * step)
    assert float((jax.grad(total)(weight) * direction).sum()) == pytest.approx(float(measured), rel=1e-2, abs=1e-3)


def test_what_corrects_the_choice_of_experts_stays_float32_in_a_bfloat16_model() -> None:
    config = read_config(ROOT / "deepseek_v3")
    weights = Programs(config, Plan(dtype="bfloat16"), abstract_mesh(MeshSpec())).weights
    dtypes = {name: weight.abstract.dtype.name for name, weight in weights.items()}
    corrections = {name for name in dtypes if name.endswith("route_bias")}
    assert config.moe is not None
    assert len(corrections) == sum(config.moe.layers)
    assert {dtypes.pop(name) for name in corrections} == {"float32"}
    assert set(dtypes.values()) == {"bfloat16"}
