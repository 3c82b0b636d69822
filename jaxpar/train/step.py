"""The training step: the modules of inference, differentiated, in one `shard_map` over dp and tp.

    tokens [B, T+1] over dp -> loss -> each rank's gradients -> summed over the axes of each weight's copies -> AdamW

The optimizer runs inside: its state is laid out like the weights, so an update is local, and the type check shows that
replicated weights stay equal on all ranks. The residual stream is one copy a rank: where a sublayer's finished sum
joins it, JAX casts the sum to varying, and transposes that cast into a sum of its gradient over tp. So there are two
all-reduces a layer backward as there are forward (Megatron-LM's f and g).
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from jaxpar.checkpoint.config import ModelConfig
from jaxpar.collectives import to_varying
from jaxpar.errors import PlanError
from jaxpar.ledger.traffic import Traffic
from jaxpar.nn.context import StepContext
from jaxpar.nn.rope import angles
from jaxpar.plan import Plan
from jaxpar.program import Programs, Weights
from jaxpar.registry import check, chosen, find
from jaxpar.strategies import Step
from jaxpar.train.attention import ChunkOnly, attend_whole
from jaxpar.train.gradients import replicated_axes
from jaxpar.train.loss import mean_loss
from jaxpar.train.optimizer import Optimizer
from jaxpar.train.settings import TrainSettings


class TrainState(NamedTuple):
    """Weights in float32 by name, and the optimizer's state, whose moments are laid out like them."""

    weights: Any
    optimizer: Any


class TrainPrograms:
    """The programs of a run, `step` and `evaluate`, the shardings of what they take, and the optimizer."""

    def __init__(self, config: ModelConfig, plan: Plan, mesh: Mesh | AbstractMesh, settings: TrainSettings) -> None:
        """Declare the model and the optimizer; nothing is compiled before the first step.

        Raises:
            PlanError: a mesh that cannot train this model, a batch that dp does not divide, a dtype not float32.
        """
        if plan.dtype != "float32":
            raise PlanError(f"dtype={plan.dtype}: small updates would be rounded away; train in float32")
        self.programs = Programs(config, plan, mesh)
        self.config, self.plan, self.settings = config, plan, settings
        replicas = plan.mesh.dp
        if settings.batch % replicas:
            raise PlanError(f"batch={settings.batch} does not split over dp={replicas}: use a multiple of {replicas}")
        if plan.mesh.cp > 1 or plan.sequence_parallel:
            given = f"cp={plan.mesh.cp}" if plan.mesh.cp > 1 else "sequence_parallel"
            raise PlanError(f"{given}: training keeps sequences whole on a rank; use dp and tp alone")
        if plan.mesh.ep > 1:
            raise PlanError(f"ep={plan.mesh.ep}: training has no experts to split; give these ranks to dp")
        if config.moe is not None:
            raise PlanError(f"{config.model_type} has mixtures of experts: training is for dense models")
        self._shape = Step(config, plan, "prefill", settings.batch // replicas, settings.length, settings.length)
        forward = chosen(self._shape)
        self._embedding, self._head, self._all_reduce = (forward[name] for name in ("embedding", "head", "all_reduce"))
        self._loss, self._gradient = find("loss", "vocab_parallel"), find("gradient", "psum")
        self._forward, self._once = (self._embedding, self._head, self._all_reduce), (self._loss, self._gradient)
        check((*self._forward, *self._once), self._shape)
        self.optimizer = Optimizer(settings, self.programs.weights)

    @cached_property
    def state_specs(self) -> TrainState:
        """PartitionSpecs of the state."""
        weights = {name: weight.abstract for name, weight in self.programs.weights.items()}
        specs = self.programs.weight_specs
        return TrainState(specs, self.optimizer.specs(weights, specs))

    @property
    def batch_spec(self) -> P:
        """PartitionSpec of tokens [B, T+1]: sequences over dp."""
        return P(self.plan.requests or None, None)

    def start(self, weights: Weights) -> TrainState:
        """The state before the first step, from weights on the mesh."""
        shardings = self.programs.sharded(self.state_specs.optimizer)
        return TrainState(weights, jax.jit(self.optimizer.init, out_shardings=shardings)(weights))

    @cached_property
    def step(self) -> Any:
        """(state, donated; tokens [B, T+1] int32) -> (the next state, the mean loss of the batch in nats)."""
        program = jax.shard_map(
            self._local_step,
            mesh=self.programs.mesh,
            in_specs=(self.state_specs, self.batch_spec),
            out_specs=(self.state_specs, P()),
        )
        return jax.jit(program, donate_argnums=0)

    @cached_property
    def evaluate(self) -> Any:
        """(weights, tokens [B, T+1] int32) -> the mean loss [B] of each sequence in nats."""

        def local(weights: Weights, tokens: jax.Array) -> jax.Array:
            return self.token_losses(weights, tokens).mean(axis=1)

        specs = (self.programs.weight_specs, self.batch_spec)
        out = P(self.plan.requests or None)
        return jax.jit(jax.shard_map(local, mesh=self.programs.mesh, in_specs=specs, out_specs=out))

    def traffic(self) -> list[Traffic]:
        """What each rank sends in a step: every sublayer as much backward as forward, the loss, and the gradients."""
        strategies = (*self._forward, *self._forward, *self._once)
        return [row for strategy in strategies for row in strategy.traffic(self._shape)]

    def token_losses(self, weights: Weights, tokens: jax.Array) -> jax.Array:
        """In the local view: tokens [B, T+1] -> the loss [B, T] of each token after the first, in nats."""
        plan, config = self.plan, self.config
        model = self.programs.bind(weights)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        positions = jnp.broadcast_to(jnp.arange(inputs.shape[1], dtype=jnp.int32)[None, :], inputs.shape)
        cos, sin = angles(positions.reshape(-1), config.rope, config.rope_head_dim)
        store, all_reduce = ChunkOnly(positions), self._all_reduce.run
        step = StepContext(plan, "prefill", positions, cos, sin, store, attend_whole, (), None, all_reduce)
        x = self._embedding.run(inputs.reshape(-1), model.embedding[...], plan.sublayer("vocabulary", "prefill"))
        with jax.named_scope("embedding:vocab_parallel"):
            # The residual stream is one copy a rank from here on, so that every sum of its gradient has its scope.
            x = to_varying(x, plan.width)
        x, _, _ = model(x, [{} for _ in self.programs.planes], step)
        logits = self._head.run(x, model.head_weight[...], config.vocab_size, plan.width)
        losses: jax.Array = self._loss.run(logits, targets.reshape(-1), plan.width)
        return losses.reshape(targets.shape)

    def loss_and_gradients(self, weights: Weights, tokens: jax.Array) -> tuple[jax.Array, Weights, jax.Array]:
        """In the local view: the mean loss of the whole batch, its gradients, laid out like the weights, their norm."""
        specs, plan = self.programs.weight_specs, self.plan
        copies = {name: to_varying(weight, replicated_axes(specs[name], plan)) for name, weight in weights.items()}

        def loss(copies: Weights) -> jax.Array:
            return mean_loss(self.token_losses(copies, tokens), plan.requests, plan.mesh.dp)

        value, contributions = jax.value_and_grad(loss)(copies)
        gradients, norm = self._gradient.run(contributions, specs, plan)
        return value, gradients, norm

    def _local_step(self, state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
        loss, gradients, norm = self.loss_and_gradients(state.weights, tokens)
        with jax.named_scope("optimizer"):
            return TrainState(*self.optimizer.update(gradients, norm, state.optimizer, state.weights)), loss
