"""The training step: the modules of inference, differentiated, in one `shard_map` over dp, ep and tp.

    tokens [B, T+1] over dp, ep -> loss -> gradients of each rank -> summed over the axes of a weight's copies -> AdamW

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
from jaxpar.checkpoint.save import SAVED_EXPERTS
from jaxpar.collectives import to_varying
from jaxpar.errors import PlanError
from jaxpar.ledger.traffic import Traffic
from jaxpar.moe.bind import bound as dispatched
from jaxpar.moe.record import LayerRecord
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


class BatchLoss(NamedTuple):
    """What a step measures over its whole batch, before its update.

    `cross_entropy` [] is the mean over tokens in nats. Of L layers with E experts `balance` [L] are the losses of
    `train.balance` and `loads` [L, E] int32 the choices that each expert got; both None without experts.
    """

    cross_entropy: Any
    balance: Any = None
    loads: Any = None


class TrainPrograms:
    """The programs of a run, `step` and `evaluate`, the shardings of what they take, and the optimizer."""

    def __init__(self, config: ModelConfig, plan: Plan, mesh: Mesh | AbstractMesh, settings: TrainSettings) -> None:
        """Declare the model and the optimizer; nothing is compiled before the first step.

        Raises:
            PlanError: a mesh that cannot train this model, a batch that dp and ep do not divide, a dtype not float32.
        """
        if plan.dtype != "float32":
            raise PlanError(f"dtype={plan.dtype}: small updates would be rounded away; train in float32")
        if plan.kv_split != "replicate":
            raise PlanError(f"kv_split={plan.kv_split!r}: training keeps heads whole; leave it out")
        self.programs = Programs(config, plan, mesh)
        self.config, self.plan, self.settings = config, plan, settings
        replicas = plan.mesh.extent(("dp", "ep"))
        if settings.batch % replicas:
            axes = "*".join(f"{axis}={plan.mesh.sizes[axis]}" for axis in plan.requests)
            raise PlanError(f"batch={settings.batch} does not split over {axes}: use a multiple of {replicas}")
        if plan.mesh.cp > 1 or plan.sequence_parallel:
            given = f"cp={plan.mesh.cp}" if plan.mesh.cp > 1 else "sequence_parallel"
            raise PlanError(f"{given}: training keeps sequences whole on a rank; use dp, ep and tp alone")
        if plan.pipeline:
            raise PlanError(f"pp={plan.mesh.pp}: training runs all layers on a rank; use dp, ep and tp alone")
        if plan.two_batch_overlap:
            raise PlanError("two_batch_overlap: training runs a step as one batch; leave it out")
        if config.moe is None and plan.mesh.ep > 1:
            raise PlanError(f"ep={plan.mesh.ep}: the model has no experts to split; give these ranks to dp")
        if config.moe is not None and config.model_type not in SAVED_EXPERTS:
            raise PlanError(
                f"{config.model_type} cannot be trained with its experts: choose {' or '.join(SAVED_EXPERTS)}"
            )
        self._shape = Step(
            config,
            plan,
            "prefill",
            settings.batch // replicas,
            settings.length,
            settings.length,
            differentiated=True,
        )
        forward = chosen(self._shape)
        self._embedding, self._head, self._all_reduce = (forward[name] for name in ("embedding", "head", "all_reduce"))
        self._dispatch = forward.get("moe_dispatch")
        self._loss, self._gradient = find("loss", "vocab_parallel"), find("gradient", "psum")
        self._balance = find("balance", "global_batch")
        check((self._loss, self._gradient), self._shape)
        if self._all_reduce.backward is None:
            raise PlanError(f"all_reduce={self._all_reduce.name!r} is not differentiated: train with psum")
        if self._dispatch and self._dispatch.backward is None:
            raise PlanError(
                f"moe_dispatch={self._dispatch.name!r} is not differentiated: "
                "train with standard, all_to_all or two_level"
            )
        if self._dispatch and plan.moe_capacity:
            raise PlanError(f"moe_capacity={plan.moe_capacity}: training drops no token; leave it out")
        if plan.expert_slots:
            raise PlanError(f"expert_slots={plan.expert_slots}: copies of an expert would learn apart; leave it out")
        self.optimizer = Optimizer(settings, self.programs.weights)

    @cached_property
    def state_specs(self) -> TrainState:
        """PartitionSpecs of the state."""
        specs = self.programs.weight_specs
        return TrainState(specs, self.optimizer.specs(self._abstract_weights, specs))

    @property
    def abstract_state(self) -> TrainState:
        """Shapes of the state."""
        weights = self._abstract_weights
        return TrainState(weights, jax.eval_shape(self.optimizer.init, weights))

    @property
    def _abstract_weights(self) -> dict[str, jax.ShapeDtypeStruct]:
        return {name: weight.abstract for name, weight in self.programs.weights.items()}

    @property
    def batch_spec(self) -> P:
        """PartitionSpec of tokens [B, T+1]: sequences over dp and ep."""
        return P(self.plan.requests or None, None)

    @property
    def loss_specs(self) -> BatchLoss:
        """PartitionSpecs of what a step measures: the same on all ranks."""
        return BatchLoss(P()) if self.config.moe is None else BatchLoss(P(), P(), P())

    def start(self, weights: Weights) -> TrainState:
        """The state before the first step, from weights on the mesh."""
        shardings = self.programs.sharded(self.state_specs.optimizer)
        return TrainState(weights, jax.jit(self.optimizer.init, out_shardings=shardings)(weights))

    @cached_property
    def step(self) -> Any:
        """(state, donated; tokens [B, T+1] int32) -> (the next state, BatchLoss)."""
        program = jax.shard_map(
            self._local_step,
            mesh=self.programs.mesh,
            in_specs=(self.state_specs, self.batch_spec),
            out_specs=(self.state_specs, self.loss_specs),
        )
        return jax.jit(program, donate_argnums=0)

    @cached_property
    def evaluate(self) -> Any:
        """(weights, tokens [B, T+1] int32) -> the mean loss [B] of each sequence in nats."""

        def local(weights: Weights, tokens: jax.Array) -> jax.Array:
            losses, _ = self.token_losses(weights, tokens)
            return losses.mean(axis=1)

        specs = (self.programs.weight_specs, self.batch_spec)
        out = P(self.plan.requests or None)
        return jax.jit(jax.shard_map(local, mesh=self.programs.mesh, in_specs=specs, out_specs=out))

    def traffic(self) -> list[Traffic]:
        """What each rank sends in a step: every sublayer forward and backward, the losses, and the gradients."""
        both_ways = (self._embedding, self._head, self._all_reduce, *([self._dispatch] if self._dispatch else []))
        strategies = (*both_ways, self._loss, self._balance, self._gradient)
        return [row for strategy in strategies for row in strategy.sent(self._shape)]

    def token_losses(self, weights: Weights, tokens: jax.Array) -> tuple[jax.Array, list[LayerRecord]]:
        """In the local view: tokens [B, T+1] -> the loss [B, T] of each after the first in nats, records of experts."""
        plan, config = self.plan, self.config
        model = self.programs.bind(weights)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        positions = jnp.broadcast_to(jnp.arange(inputs.shape[1], dtype=jnp.int32)[None, :], inputs.shape)
        cos, sin = angles(positions.reshape(-1), config.rope, config.rope_head_dim)
        store, reduction = ChunkOnly(positions), self._all_reduce.run(plan)
        dispatch = None if self._dispatch is None else dispatched(self._dispatch, self._shape)
        step = StepContext(plan, "prefill", positions, cos, sin, store, attend_whole, (), dispatch, reduction)
        x = self._embedding.run(inputs.reshape(-1), model.embedding_rows, plan.sublayer("vocabulary", "prefill"))
        with jax.named_scope("embedding:vocab_parallel"):
            # The residual stream is one copy a rank from here on, so that every sum of its gradient has its scope.
            x = to_varying(x, plan.width)
        (x,), _, records = model([x], [{} for _ in self.programs.planes], [step])
        logits = self._head.run(model.normed(x), model.head_rows, config.vocab_size, plan.width)
        losses: jax.Array = self._loss.run(logits, targets.reshape(-1), plan.width)
        return losses.reshape(targets.shape), records

    def loss_and_gradients(self, weights: Weights, tokens: jax.Array) -> tuple[BatchLoss, Weights, jax.Array]:
        """In the local view: the losses of the whole batch, their gradients, laid out like the weights, and the norm.

        What is differentiated is the cross-entropy and, as in Megatron-LM, `aux_loss_coef` times the sum over layers of
        their balance losses.
        """
        specs, plan, moe = self.programs.weight_specs, self.plan, self.config.moe
        copies = {name: to_varying(weight, replicated_axes(specs[name], plan)) for name, weight in weights.items()}

        def loss(copies: Weights) -> tuple[jax.Array, BatchLoss]:
            losses, records = self.token_losses(copies, tokens)
            mean = mean_loss(losses, plan.requests, plan.mesh.extent(plan.requests))
            if moe is None:
                return mean, BatchLoss(mean)
            balance, loads = self._balance.run(records, moe.router.top_k, plan)
            return mean + self.settings.aux_loss_coef * balance.sum(), BatchLoss(mean, balance, loads)

        (_, measured), contributions = jax.value_and_grad(loss, has_aux=True)(copies)
        gradients, norm = self._gradient.run(contributions, specs, plan)
        return measured, gradients, norm

    def _local_step(self, state: TrainState, tokens: jax.Array) -> tuple[TrainState, BatchLoss]:
        measured, gradients, norm = self.loss_and_gradients(state.weights, tokens)
        with jax.named_scope("optimizer"):
            return TrainState(*self.optimizer.update(gradients, norm, state.optimizer, state.weights)), measured
