"""Experts are trained on a mesh as on one device: losses, gradients, updates, balance and bytes."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file
from test_train import AWKWARD, TOKENS, abstract_weights, collect
from uniform import uniform_control_violations

from jaxpar.checkpoint.config import ModelConfig, MoEConfig, RouterConfig
from jaxpar.checkpoint.hf_config import read_config
from jaxpar.checkpoint.hf_moe import QWEN3_TENSORS
from jaxpar.checkpoint.load import load_weights
from jaxpar.checkpoint.save import write_model
from jaxpar.devices import abstract_mesh, ensure_devices, make_mesh
from jaxpar.errors import PlanError
from jaxpar.ledger.trace import trace_traffic
from jaxpar.ledger.traffic import Traffic, compare
from jaxpar.mesh import MeshSpec
from jaxpar.moe.record import LayerRecord
from jaxpar.plan import Plan
from jaxpar.train.balance import balance_losses
from jaxpar.train.checkpoint import ArrayReader, fresh_tensors
from jaxpar.train.settings import TrainSettings
from jaxpar.train.step import BatchLoss, TrainPrograms

# Six experts, which neither four ranks nor eight divide, of a width that tp does not, after a dense layer.
EXPERTS, CHOICES = 6, 2
SPARSE = dataclasses.replace(
    AWKWARD,
    model_type="qwen3_moe",
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    windows=(None, None),
    moe=MoEConfig(EXPERTS, 5, (False, True), RouterConfig(CHOICES, norm_topk_prob=True), QWEN3_TENSORS),
)
# A balance loss that weighs as much as the cross-entropy: none of its gradient is lost among the others.
SETTINGS = TrainSettings(
    steps=10, batch=8, length=7, learning_rate=0.01, seed=3, checkpoint_every=10, aux_loss_coef=0.5
)
BATCHES = np.concatenate([TOKENS, TOKENS[::-1, ::-1]], axis=1)
ALL = {"experts_over": ("dp", "ep", "tp")}
TRAINED: dict[str, tuple[str, dict[str, Any]]] = {
    "gathered": ("ep=2", {"moe_dispatch": "standard"}),
    "width over tp": ("dp=2,ep=2,tp=2", {"moe_dispatch": "all_to_all"}),
    "over all axes": ("dp=2,ep=2,tp=2", {"moe_dispatch": "all_to_all", **ALL}),
    "two levels": ("dp=2,ep=2,tp=2", {"moe_dispatch": "two_level", "devices_per_node": 4, **ALL}),
}
COUNTED = {
    **TRAINED,
    "auto": ("dp=2,ep=4", {}),
    "gathered over all axes": ("dp=2,ep=2,tp=2", {"moe_dispatch": "standard", **ALL}),
    "once a rank, back in blocks": (
        "ep=4,tp=2",
        {"moe_dispatch": "all_to_all", "moe_deduplicate": True, "single_batch_overlap": 2},
    ),
    "two levels, the outer alone": ("ep=4", {"moe_dispatch": "two_level", "devices_per_node": 1}),
    "on every rank of dp": ("dp=2,tp=2", {}),
}


def plan_of(mesh: str, fields: dict[str, Any]) -> Plan:
    return Plan(mesh=MeshSpec.parse(mesh), **fields)


@cache
def programs_of(name: str) -> TrainPrograms:
    plan = plan_of(*TRAINED[name]) if name in TRAINED else Plan()
    return TrainPrograms(SPARSE, plan, make_mesh(plan.mesh, ensure_devices(plan.mesh)), SETTINGS)


def start_tensors(programs: TrainPrograms, skewed: bool) -> dict[str, np.ndarray]:
    """Weights away from their usual start; `skewed`: of all tokens one choice is expert 0 or 1, the other expert 2."""
    noise = np.random.default_rng(0)
    tensors = {
        name: value + 0.2 * noise.standard_normal(value.shape, np.float32)
        for name, value in sorted(fresh_tensors(programs.programs.weights, SETTINGS.seed).items())
    }
    if skewed:
        router = tensors["model.layers.1.mlp.gate.weight"]
        router[1], router[2:] = -router[0], 0.0
    return tensors


@cache
def two_steps(name: str, skewed: bool) -> tuple[list[BatchLoss], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The losses of both, and then the first moments of the gradients and the weights, by checkpoint tensor."""
    programs = programs_of(name)
    reader = ArrayReader(start_tensors(programs, skewed), Path("test"))
    state = programs.start(load_weights(programs.programs.weights, reader, programs.programs.mesh))
    losses = []
    for tokens in BATCHES:
        state, measured = programs.step(state, tokens)
        losses.append(jax.tree.map(np.asarray, measured))
    mu, _ = programs.optimizer.moments(state.optimizer)
    return losses, collect(programs, mu), collect(programs, state.weights)


def largest_error(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """The largest difference of a tensor, against its largest value; an expert to which nothing went has zeros."""
    assert found.keys() == expected.keys()
    return max(np.abs(found[name] - expected[name]).max() / max(np.abs(expected[name]).max(), 1e-6) for name in found)


@pytest.mark.parametrize("skewed", [False, True], ids=["routed", "skewed"])
@pytest.mark.parametrize("name", TRAINED)
def test_losses_gradients_and_updates_are_those_of_one_device(name: str, skewed: bool) -> None:
    losses, gradients, weights = two_steps(name, skewed)
    expected_losses, expected_gradients, expected = two_steps("one device", skewed)
    for loss, expected_loss in zip(losses, expected_losses, strict=True):
        assert loss.cross_entropy == pytest.approx(expected_loss.cross_entropy, rel=1e-6)
        np.testing.assert_allclose(loss.balance, expected_loss.balance, rtol=1e-5)
        np.testing.assert_array_equal(loss.loads, expected_loss.loads)
    assert largest_error(gradients, expected_gradients) < 1e-5
    if not skewed:
        # Adam scales every value to the same step: of one whose gradient all but vanishes it shows the rounding.
        assert largest_error(weights, expected) < 1e-4


def test_skewed_routing_sends_half_of_all_choices_to_one_expert_which_takes_several_rounds() -> None:
    losses, gradients, _ = two_steps("over all axes", True)
    tokens = SETTINGS.batch * SETTINGS.length
    for loss in losses:
        assert (loss.loads.sum(axis=1) == CHOICES * tokens).all()
    # In the first step; then the router has learnt. Seven rows a rank with two choices, of which three are for a pair.
    assert losses[0].loads[:, 2].tolist() == [tokens]
    assert np.abs(gradients["model.layers.1.mlp.experts.2.down_proj.weight"]).max() > 1e-4


# --- balance ---


def numpy_balance(loads: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Of loads and sums of scores [L, E] over all tokens."""
    shares = loads / loads.sum(axis=1, keepdims=True)
    means = scores / (loads.sum(axis=1, keepdims=True) / CHOICES)
    return EXPERTS * (shares * means).sum(axis=1)


@pytest.mark.parametrize("over", [("ep",), ("ep", "tp")], ids=["copies on tp", "dealt over tp"])
def test_the_balance_loss_counts_every_token_of_all_ranks_once_and_so_does_its_gradient(over: tuple[str, ...]) -> None:
    plan = Plan(mesh=MeshSpec(dp=2, ep=2, tp=2), experts_over=over)
    rng = np.random.default_rng(5)
    holders = 4 if over == ("ep",) else 8
    scores = rng.dirichlet(np.ones(EXPERTS), (holders, 3, 7)).sum(axis=2, dtype=np.float32)
    loads = rng.multinomial(7 * CHOICES, rng.dirichlet(np.ones(EXPERTS)), (holders, 3)).astype(np.int32)

    def local(loads: jax.Array, scores: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        def loss(scores: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            records = [LayerRecord(loads[0, layer], scores[0, layer], None) for layer in range(3)]
            balance, total = balance_losses(records, CHOICES, plan)
            return balance.sum(), (balance, total)

        (_, (balance, total)), slopes = jax.value_and_grad(loss, has_aux=True)(scores)
        return balance, total, slopes

    everywhere = P(("dp", "ep", "tp"))
    program = jax.shard_map(
        local,
        mesh=make_mesh(plan.mesh, ensure_devices(plan.mesh)),
        in_specs=everywhere,
        out_specs=(P(), P(), everywhere),
    )
    copies = 8 // holders
    balance, total, slopes = jax.jit(program)(*(np.repeat(x, copies, axis=0) for x in (loads, scores)))
    np.testing.assert_array_equal(total, loads.sum(axis=0))
    np.testing.assert_allclose(balance, numpy_balance(loads.sum(axis=0), scores.sum(axis=0)), rtol=1e-6)
    choices = total.sum(axis=1, keepdims=True)
    slope = EXPERTS * CHOICES * np.asarray(total) / np.square(choices, dtype=np.float64)
    of_token = np.asarray(slopes).reshape(holders, copies, 3, EXPERTS).sum(axis=1)
    np.testing.assert_allclose(of_token, np.broadcast_to(slope, of_token.shape), rtol=1e-6)


@pytest.mark.parametrize(("loads", "expected"), [([4, 4, 4, 4, 4, 4], 1.0), ([24, 0, 0, 0, 0, 0], EXPERTS)])
def test_an_even_layer_has_the_loss_1_and_one_that_uses_one_expert_alone_the_number_of_experts(
    loads: list[int], expected: float
) -> None:
    shares = np.array(loads, np.float32) * 12 / 24
    balance, _ = balance_losses([LayerRecord(np.array(loads, np.int32), shares, None)], CHOICES, Plan())
    np.testing.assert_allclose(balance, [expected], rtol=1e-6)


# --- what a step sends ---


def traced(name: str) -> tuple[TrainPrograms, list[Traffic], list[str]]:
    plan = plan_of(*COUNTED[name])
    programs = TrainPrograms(SPARSE, plan, abstract_mesh(plan.mesh), SETTINGS)
    weights = abstract_weights(programs)
    state = (weights, jax.eval_shape(programs.optimizer.init, weights))
    step = jax.make_jaxpr(programs.step)(type(programs.state_specs)(*state), BATCHES[0])
    sizes = plan.mesh.sizes
    return programs, trace_traffic(step, sizes), uniform_control_violations(step, sizes)


@pytest.mark.parametrize("name", COUNTED)
def test_predicted_bytes_are_those_that_the_step_sends_and_no_rank_parts_ways(name: str) -> None:
    programs, sent, violations = traced(name)
    assert compare(programs.traffic(), sent) == []
    assert violations == []


# --- files ---


def test_six_experts_come_back_from_four_ranks_as_they_were_saved(tmp_path: Path) -> None:
    spec = MeshSpec(ep=4)
    programs = TrainPrograms(SPARSE, Plan(mesh=spec), make_mesh(spec, ensure_devices(spec)), SETTINGS)
    tensors = fresh_tensors(programs.programs.weights, seed=1)
    arrays = load_weights(programs.programs.weights, ArrayReader(tensors, tmp_path), programs.programs.mesh)
    write_model(tmp_path, SPARSE, collect(programs, arrays))
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == tensors.keys()
    assert sum(name.startswith("model.layers.1.mlp.experts.") for name in saved) == 3 * EXPERTS
    for name, value in tensors.items():
        np.testing.assert_array_equal(saved[name], value, err_msg=name)
    assert read_config(tmp_path) == SPARSE


# --- what cannot be trained ---


@pytest.mark.parametrize(
    ("plan", "config", "complaint"),
    [
        (
            Plan(mesh=MeshSpec(ep=2), moe_dispatch="ragged"),
            SPARSE,
            "^moe_dispatch='ragged' is not differentiated: train with standard, all_to_all or two_level$",
        ),
        (
            Plan(mesh=MeshSpec(ep=2), moe_dispatch="all_to_all", moe_capacity=1.5),
            SPARSE,
            "^moe_capacity=1.5: training drops no token",
        ),
        (Plan(two_batch_overlap=True), SPARSE, "^two_batch_overlap: training runs a step as one batch; leave it out$"),
        (Plan(mesh=MeshSpec(ep=2), expert_slots=64), SPARSE, "^expert_slots=64: copies of an expert would learn apart"),
        (Plan(mesh=MeshSpec(dp=2, ep=3)), SPARSE, "^batch=8 does not split over dp=2.ep=3: use a multiple of 6"),
        (Plan(mesh=MeshSpec(ep=2)), AWKWARD, "^ep=2: the model has no experts to split; give these ranks to dp"),
        (
            Plan(),
            dataclasses.replace(SPARSE, model_type="gpt_oss"),
            "^gpt_oss cannot be trained with its experts: choose mixtral or qwen3_moe",
        ),
    ],
)
def test_a_plan_that_cannot_train_experts_is_refused_before_anything_is_compiled(
    plan: Plan, config: ModelConfig, complaint: str
) -> None:
    with pytest.raises(PlanError, match=complaint):
        TrainPrograms(config, plan, abstract_mesh(plan.mesh), SETTINGS)
