"""The training step: its loss, gradients and updates on every mesh are those of one device, and so are its bytes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from oracle_data import load_oracle
from uniform import uniform_control_violations

from jaxpar.checkpoint.config import ModelConfig, RopeConfig
from jaxpar.checkpoint.hf_config import read_config
from jaxpar.checkpoint.load import load_weights
from jaxpar.checkpoint.safetensors_reader import SafetensorsReader
from jaxpar.checkpoint.save import collect_tensors
from jaxpar.devices import ensure_devices, make_mesh
from jaxpar.errors import PlanError, RequestError
from jaxpar.ledger.trace import count_collectives, trace_traffic
from jaxpar.ledger.traffic import Traffic, compare
from jaxpar.mesh import MeshSpec
from jaxpar.plan import Plan
from jaxpar.train.checkpoint import ArrayReader, fresh_tensors
from jaxpar.train.gradients import replicated_axes
from jaxpar.train.loss import cross_entropy
from jaxpar.train.optimizer import BETA1, BETA2, CLIP_NORM, WEIGHT_DECAY
from jaxpar.train.settings import TrainSettings
from jaxpar.train.step import BatchLoss, TrainPrograms

Arrays = dict[str, jax.Array]

# Nine query and three KV heads (padded on tp 2 and 4), a vocabulary and a width that tp does not divide, every bias.
AWKWARD = ModelConfig(
    model_type="llama",
    vocab_size=53,
    hidden_size=20,
    intermediate_size=27,
    num_hidden_layers=2,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=6,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    rope=RopeConfig(),
    windows=(None, 3),
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    qk_norm=True,
)
TIED = dataclasses.replace(
    AWKWARD,
    tie_word_embeddings=True,
    num_attention_heads=8,
    num_key_value_heads=4,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=False,
    bos_token_id=0,
    eos_token_ids=(1,),
)
SETTINGS = TrainSettings(steps=10, batch=4, length=7, learning_rate=0.01, seed=3, checkpoint_every=10)
MESHES = ["dp=2", "tp=2", "tp=4", "dp=2,tp=4"]
TOKENS = np.random.default_rng(1).integers(0, AWKWARD.vocab_size, (2, SETTINGS.batch, SETTINGS.length + 1), np.int32)


def programs_of(config: ModelConfig, mesh: str) -> TrainPrograms:
    spec = MeshSpec.parse(mesh)
    return TrainPrograms(config, Plan(mesh=spec), make_mesh(spec, ensure_devices(spec)), SETTINGS)


def start_weights(programs: TrainPrograms) -> Arrays:
    """Weights away from their usual start, where norms of 1, biases of 0 and small logits hide faults."""
    weights = programs.programs.weights
    noise = np.random.default_rng(0)
    tensors = {
        name: value + 0.2 * noise.standard_normal(value.shape, np.float32)
        for name, value in sorted(fresh_tensors(weights, SETTINGS.seed).items())
    }
    return load_weights(weights, ArrayReader(tensors, Path("test")), programs.programs.mesh)


def abstract_weights(programs: TrainPrograms) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: weight.abstract for name, weight in programs.programs.weights.items()}


def collect(programs: TrainPrograms, arrays: Arrays) -> dict[str, np.ndarray]:
    """Checkpoint tensors, once every rank's copy has been compared."""
    for array in arrays.values():
        copies: dict[str, np.ndarray] = {}
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(shard.data, copies.setdefault(str(shard.index), np.asarray(shard.data)))
    return collect_tensors(programs.programs.weights, arrays)


def gradient_program(programs: TrainPrograms) -> Callable[..., tuple[BatchLoss, Arrays, jax.Array]]:
    """(weights, tokens) -> loss, gradients and their norm."""
    specs = programs.programs.weight_specs
    return jax.jit(
        jax.shard_map(
            programs.loss_and_gradients,
            mesh=programs.programs.mesh,
            in_specs=(specs, programs.batch_spec),
            out_specs=(programs.loss_specs, specs, P()),
        )
    )


@cache
def gradients_on(config: ModelConfig, mesh: str) -> tuple[float, float, dict[str, np.ndarray], Arrays]:
    """Loss, gradient norm, gradients by checkpoint tensor, and as they lie on the mesh."""
    programs = programs_of(config, mesh)
    loss, gradients, norm = gradient_program(programs)(start_weights(programs), TOKENS[0])
    return float(loss.cross_entropy), float(norm), collect(programs, gradients), gradients


def largest_error(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """The largest difference of a tensor, against its largest value."""
    assert found.keys() == expected.keys()
    return max(np.abs(found[name] - expected[name]).max() / np.abs(expected[name]).max() for name in expected)


# --- one step ---


@pytest.mark.parametrize(("config", "mesh"), [(AWKWARD, mesh) for mesh in MESHES] + [(TIED, "dp=2,tp=4")])
def test_loss_and_every_gradient_are_those_of_one_device(config: ModelConfig, mesh: str) -> None:
    loss, norm, gradients, _ = gradients_on(config, mesh)
    expected_loss, expected_norm, expected, _ = gradients_on(config, "tp=1")
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert norm == pytest.approx(expected_norm, rel=1e-6)
    assert min(np.abs(gradient).max() for gradient in expected.values()) > 1e-4
    assert largest_error(gradients, expected) < 1e-5


def test_a_sum_that_is_left_out_is_refused_when_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_dp(spec: P, plan: Plan) -> tuple[str, ...]:
        return tuple(axis for axis in replicated_axes(spec, plan) if axis == "dp")

    programs = programs_of(TIED, "dp=2,tp=4")
    monkeypatch.setattr("jaxpar.train.gradients.replicated_axes", only_dp)
    with pytest.raises(ValueError, match=r"out_specs which require replication"):
        gradient_program(programs).trace(abstract_weights(programs), TOKENS[0])


def test_a_sum_on_top_of_the_one_that_jax_takes_is_refused_when_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = programs_of(TIED, "dp=2,tp=4")
    monkeypatch.setattr("jaxpar.train.step.to_varying", lambda x, axes: x)
    with pytest.raises(PlanError, match=r"all_sum over dp .* counted more than once"):
        gradient_program(programs).trace(abstract_weights(programs), TOKENS[0])


def test_gradients_are_the_slopes_of_the_loss() -> None:
    programs = programs_of(AWKWARD, "tp=1")
    weights = start_weights(programs)
    _, norm, _, gradients = gradients_on(AWKWARD, "tp=1")
    size = 1e-2 / norm

    def loss(sign: float) -> float:
        moved = {name: weights[name] + sign * size * gradients[name] for name in weights}
        return float(programs.evaluate(moved, TOKENS[0]).mean())

    assert (loss(1) - loss(-1)) / (2 * size) == pytest.approx(norm**2, rel=1e-2)


def test_gradients_of_padding_are_zero() -> None:
    *_, on_mesh = gradients_on(AWKWARD, "tp=4")
    padded_head = np.asarray(on_mesh["slots.0.attention.qkv.weight"])[0].reshape(4, -1, 20)[3]
    padded_vocabulary = np.asarray(on_mesh["embedding"])[53:]
    assert padded_head.shape == (30, 20)
    assert padded_vocabulary.shape == (3, 20)
    assert not padded_head.any()
    assert not padded_vocabulary.any()


def test_norm_counts_every_tensor_once() -> None:
    _, norm, gradients, _ = gradients_on(AWKWARD, "dp=2,tp=4")
    assert norm == pytest.approx(math.sqrt(sum(np.vdot(g, g) for g in gradients.values())), rel=1e-6)


@cache
def two_steps(mesh: str) -> tuple[list[float], dict[str, np.ndarray]]:
    programs = programs_of(TIED, mesh)
    state, losses = programs.start(start_weights(programs)), []
    for tokens in TOKENS:
        state, loss = programs.step(state, tokens)
        losses.append(float(loss.cross_entropy))
    return losses, collect(programs, state.weights)


def test_steps_are_those_of_one_device() -> None:
    losses, weights = two_steps("dp=2,tp=4")
    expected_losses, expected = two_steps("tp=1")
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    assert largest_error(weights, expected) < 1e-4


def test_steps_are_those_of_optax_on_whole_tensors() -> None:
    programs = programs_of(TIED, "tp=1")
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.01, 1, 10, 0.0005)
    mask = {name: len(weight.sources[0].shape) > 1 for name, weight in programs.programs.weights.items()}
    reference = optax.chain(
        optax.clip_by_global_norm(CLIP_NORM),
        optax.adamw(schedule, b1=BETA1, b2=BETA2, weight_decay=WEIGHT_DECAY, mask=mask),
    )
    start = weights = start_weights(programs)
    gradients_of = gradient_program(programs)

    @jax.jit
    def update(gradients: Arrays, state: optax.OptState, weights: Arrays) -> tuple[Arrays, optax.OptState]:
        updates, state = reference.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state

    state = jax.jit(reference.init)(weights)
    for tokens in TOKENS:
        _, gradients, norm = gradients_of(weights, tokens)
        assert norm > CLIP_NORM
        weights, state = update(gradients, state, weights)
    expected = collect(programs, weights)
    moved = collect(programs, {name: weights[name] - start[name] for name in weights})
    assert min(np.abs(change).max() for change in moved.values()) > 5e-3
    assert largest_error(two_steps("tp=1")[1], expected) < 1e-6


def test_loss_is_what_the_logits_of_transformers_give() -> None:
    oracle = load_oracle("llama_9_3")
    prompt, logits = next(pair for pair in zip(oracle.prompts, oracle.logits, strict=True) if len(pair[0]) > 8)
    expected = np.log(np.exp(logits).sum(axis=1))[:-1] - logits[np.arange(len(prompt) - 1), prompt[1:]]
    spec = MeshSpec(tp=4)
    settings = dataclasses.replace(SETTINGS, batch=1, length=len(prompt) - 1)
    programs = TrainPrograms(read_config(oracle.dir), Plan(mesh=spec), make_mesh(spec, ensure_devices(spec)), settings)
    reader = SafetensorsReader(oracle.dir)
    weights = load_weights(programs.programs.weights, reader, programs.programs.mesh)
    loss = programs.evaluate(weights, np.array([prompt], np.int32))
    assert float(loss[0]) == pytest.approx(expected.mean(), abs=1e-5)


def test_loss_of_extreme_logits_is_finite_and_exact() -> None:
    logits = jnp.array([[1e4, 0.0, -1e4, -jnp.inf], [-1e30, -1e30, -1e30, -jnp.inf]], jnp.float32)
    targets = jnp.array([2, 1])
    loss, slope = jax.value_and_grad(lambda x: cross_entropy(x, targets, ()).sum())(logits)
    np.testing.assert_allclose(cross_entropy(logits, targets, ()), [2e4, math.log(3)], rtol=1e-6)
    np.testing.assert_allclose(slope, [[1, 0, -1, 0], [1 / 3, -2 / 3, 1 / 3, 0]], atol=1e-6)
    assert np.isfinite(loss)


# --- what a step sends ---


def traced_step(config: ModelConfig, mesh: str) -> tuple[TrainPrograms, jax.extend.core.ClosedJaxpr]:
    programs = programs_of(config, mesh)
    state = jax.eval_shape(programs.start, abstract_weights(programs))
    return programs, jax.make_jaxpr(programs.step)(state, TOKENS[0])


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("config", [AWKWARD, TIED], ids=["awkward", "tied"])
def test_predicted_bytes_are_those_that_the_step_sends(config: ModelConfig, mesh: str) -> None:
    programs, step = traced_step(config, mesh)
    sizes = programs.plan.mesh.sizes
    assert compare(programs.traffic(), trace_traffic(step, sizes)) == []
    assert uniform_control_violations(step, sizes) == []


def test_every_sum_of_a_gradient_is_listed_under_its_axes() -> None:
    programs, _ = traced_step(TIED, "dp=2,tp=4")
    gradients = [row for row in programs.traffic() if row.sublayer == "gradient"]
    calls = {axes: sum(row.calls for row in gradients if row.axes == axes) for axes in (("dp",), ("tp",), ("dp", "tp"))}
    # Embedding and four projections a layer; the norm of what is split; two norms a layer and the last one.
    assert calls == {("dp",): 1 + 2 * 4, ("tp",): 1, ("dp", "tp"): 2 * 2 + 1}
    layer_sums = [row for row in programs.traffic() if row.sublayer in ("attention", "ffn")]
    residual = SETTINGS.batch // 2 * SETTINGS.length * TIED.hidden_size * 4
    assert layer_sums == 2 * [
        Traffic(name, "psum", "all_reduce", ("tp",), 2, residual, 2 * residual * 2 * 3 // 4)
        for name in ("attention", "ffn")
    ]


def test_one_device_sends_nothing() -> None:
    programs, step = traced_step(TIED, "tp=1")
    assert count_collectives(step) == 0
    assert programs.traffic() == []


# --- what cannot be trained ---


@pytest.mark.parametrize(
    ("plan", "config", "complaint"),
    [
        (Plan(mesh=MeshSpec(tp=8)), TIED, "tp=8 stores copies of the 4 KV heads.* tp up to 4"),
        (Plan(mesh=MeshSpec(dp=3)), TIED, "batch=4 does not split over dp=3"),
        (Plan(mesh=MeshSpec(cp=2)), TIED, "^cp=2: training keeps sequences whole"),
        (Plan(mesh=MeshSpec(tp=2), sequence_parallel=True), TIED, "^sequence_parallel: training keeps sequences whole"),
        (Plan(mesh=MeshSpec(pp=2)), TIED, "^pp=2: training runs all layers on a rank"),
        (
            Plan(mesh=MeshSpec(tp=2), all_reduce="ring"),
            TIED,
            "^all_reduce='ring' is not differentiated: train with psum",
        ),
        (Plan(dtype="bfloat16"), TIED, "dtype=bfloat16.* float32"),
    ],
)
def test_a_plan_that_cannot_train_is_refused_before_anything_is_compiled(
    plan: Plan, config: ModelConfig, complaint: str
) -> None:
    mesh = make_mesh(plan.mesh, ensure_devices(plan.mesh))
    with pytest.raises(PlanError, match=complaint):
        TrainPrograms(config, plan, mesh, SETTINGS)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"steps": 0}, "steps=0"),
        ({"batch": -1}, "batch=-1"),
        ({"learning_rate": 0.0}, "learning_rate=0.0"),
        ({"learning_rate": math.nan}, "learning_rate=nan"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_settings_out_of_range_are_refused_with_the_value(change: dict[str, float], complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint):
        dataclasses.replace(SETTINGS, **change)
