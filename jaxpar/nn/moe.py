"""A mixture of experts in place of the FFN: router, the experts in a rank's slots, experts that every token passes.

    tokens [R, D] --+-- route -> dispatch -> experts -> weighted sum --+--> a partial sum over the ranks that split
                    +-- shared experts --------------------------------+    an expert's width

A rank holds whole experts, or a slice of the width of each where tp does not split experts among its ranks (MoE-TP).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.checkpoint.config import ClampedSwiGLU, ModelConfig, MoEConfig
from jaxpar.collectives import rank_index
from jaxpar.collectives.exchange import own_rows
from jaxpar.fixed import by_row
from jaxpar.moe.aligned import aligned_expert_ffn
from jaxpar.moe.grouped import Activation, expert_ffn
from jaxpar.moe.inputs import Experts, Inputs
from jaxpar.moe.placement import first_slots
from jaxpar.moe.record import LayerRecord, record
from jaxpar.moe.router import Routing, route
from jaxpar.moe.slots import EMPTY
from jaxpar.nn.context import StepContext
from jaxpar.nn.expert_map import ExpertMap
from jaxpar.nn.mlp import MLP, gate_up_source, gated
from jaxpar.nn.stage import by_stage, own_value, prefixes_of, presence, with_part
from jaxpar.nn.weights import Entry, Source, Weight, expert_weight, residual_std, weight
from jaxpar.pipeline.present import on_stages
from jaxpar.pipeline.stages import Layers
from jaxpar.plan import Plan

EXPERT_ARRAYS = ("gate_up", "down", "gate_up_bias", "down_bias")
"""The weights of an MoE layer that lie in slots; a model without biases has the first two."""


class MoE(nnx.Module):
    """Routed and shared experts of one slot of layers.

    `gate_up` [1, S, 2I, D], rank by rank of tp [its gate rows, its up rows], and `down` [1, S, D, I] of the experts in
    the rank's S slots, I the slice of their width that it holds. `map` says in which slots an expert lies, None where
    each lies in the slot of its own number.
    """

    def __init__(self, config: ModelConfig, moe: MoEConfig, plan: Plan, layers: Layers) -> None:
        """Declare the weights of the slot that holds `layers`, one a pipeline stage."""
        self.router, self.clamp, names = moe.router, moe.clamped_swiglu, moe.tensors
        over = plan.width_of("moe", "prefill")
        self.ranks = plan.mesh.extent(plan.experts)
        slots = first_slots(moe, plan).tolist()
        self.slots_per_rank = len(slots) // self.ranks
        self.map = ExpertMap(moe.num_experts, plan, len(layers)) if plan.expert_slots else None
        prefixes = prefixes_of(layers)
        self.present = presence(prefixes)
        stages, dtype, hidden = plan.pipeline, plan.dtype, config.hidden_size
        tensors = _ExpertTensors(moe, hidden, plan.mesh.extent(over))

        def declare(
            source: Callable[[str, int], Source], split: tuple[tuple[str, ...] | None, ...], init: float | str
        ) -> Weight:
            def in_slot(expert: int) -> tuple[Source, ...]:
                sources = by_stage(prefixes, lambda prefix: source(prefix, max(expert, 0)))
                return tuple(one.empty for one in sources) if expert == EMPTY else sources

            sources = tuple(zip(*map(in_slot, slots), strict=True))
            return expert_weight(sources, plan.experts, split, dtype, init, stages)

        def of_router(name: str, shape: tuple[int, ...], init: float | str) -> Weight:
            sources = by_stage(prefixes, lambda prefix: Source.whole(prefix + name, shape))
            # Published in float32 where they correct the choice: rounded, near-ties would fall otherwise.
            kept = "float32" if name == names.router_bias else dtype
            return weight(sources, (None,) * len(shape), kept, init, stages)

        self.route = of_router(names.router, (moe.num_experts, hidden), 0.02)
        self.route_bias = of_router(names.router_bias, (moe.num_experts,), "zeros") if names.router_bias else None
        self.gate_up = declare(tensors.gate_up, (over, None), 0.02)
        self.down = declare(tensors.down, (None, over), residual_std(config.num_hidden_layers))
        self.gate_up_bias = declare(tensors.gate_up_bias, (over,), "zeros") if moe.expert_bias else None
        self.down_bias = declare(tensors.down_bias, (None,), "zeros") if moe.expert_bias else None
        # Where tp deals tokens out, each rank passes its own through the whole of the shared experts: no sum.
        self.shared = (
            MLP(config, plan, with_part(prefixes, names.shared), width, over)
            if names.shared is not None and (width := moe.shared_intermediate_size)
            else None
        )

    def __call__(self, x: jax.Array, step: StepContext) -> tuple[jax.Array, LayerRecord]:
        """Tokens [R, D] -> a partial sum of [R, D] over the axes of the width."""
        bias = None if self.route_bias is None else self.route_bias[0]
        pipeline, fixed = step.plan.pipeline, step.plan.fixed_order

        def routed() -> Routing:
            return by_row(lambda tile: route(tile, self.route[0], bias, self.router), x, fixed=fixed)

        routing = on_stages(self.present, pipeline, routed)
        real = _own(step.positions >= 0, step)
        if not all(self.present):
            # Tokens of a stage that has no experts in this slot go to none, and count nowhere.
            real = real & own_value(self.present, pipeline)
        slots = (
            routing.experts
            if self.map is None
            else self.map(routing.experts, _own(token_numbers(step.positions, step.plan), step))
        )
        slots = jnp.where(real[:, None], slots, self.ranks * self.slots_per_rank)
        weights = jnp.where(real[:, None], routing.weights, 0.0)
        assert step.dispatch is not None
        experts = self._experts(step)
        done = step.dispatch(Inputs(x, slots, weights, experts, self.slots_per_rank))
        out = done.rows.astype(x.dtype)
        out = out if self.shared is None else out + self.shared(x, ())
        return out, record(routing, real, done.dropped)

    def _experts(self, step: StepContext) -> Experts:
        """The experts in this rank's slots."""
        gate_up, down = self.gate_up[0], self.down[0]
        gate_up_bias = None if self.gate_up_bias is None else self.gate_up_bias[0]
        down_bias = None if self.down_bias is None else self.down_bias[0]
        if down_bias is not None:
            # Every rank of the width adds its part of the sum, and only the first one this.
            first = rank_index(step.plan.width_of("moe", step.phase)) == 0
            down_bias = jnp.where(first, down_bias, jnp.zeros_like(down_bias))
        activation = gated if self.clamp is None else _clamped(self.clamp)

        ffn = aligned_expert_ffn if step.plan.fixed_order else expert_ffn

        def experts(rows: jax.Array, counts: jax.Array) -> jax.Array:
            with jax.named_scope("experts:grouped"):
                return on_stages(
                    self.present,
                    step.plan.pipeline,
                    lambda: ffn(rows, gate_up, down, counts, activation, gate_up_bias, down_bias),
                )

        return Experts(experts, gate_up)


def _clamped(clamp: ClampedSwiGLU) -> Activation:
    def activation(gate: jax.Array, up: jax.Array) -> jax.Array:
        gate = jnp.minimum(gate, clamp.limit)
        return gate * jax.nn.sigmoid(clamp.alpha * gate) * (jnp.clip(up, -clamp.limit, clamp.limit) + 1)

    return activation


def _own(of_tokens: jax.Array, step: StepContext) -> jax.Array:
    """What is said of each token [B, T] -> of the rank's rows [R]; 0 of those that fill slices up."""
    plan, sublayer = step.plan, step.plan.sublayer("moe", step.phase)
    rows = of_tokens.reshape(-1)
    if not sublayer.gather:
        rows = own_rows(rows, plan.row_slices(step.phase))
    return own_rows(rows, sublayer.deal)


def token_numbers(positions: jax.Array, plan: Plan) -> jax.Array:
    """A number for each token [B, T], by which it picks copies: its position and its lane's place among all lanes.

    Tokens of a prompt differ in the one, and those that are decoded together in the other. Of two half batches each has
    its own numbers: a lane's place is that among the lanes of the same half.
    """
    lanes = positions.shape[0]
    lane = rank_index(plan.requests) * lanes + jnp.arange(lanes, dtype=jnp.int32)
    return positions + lane[:, None]


@dataclass(frozen=True)
class _ExpertTensors:
    """Where a checkpoint has the weights of one expert, whose width `tp` ranks split; `prefix` is that of its layer."""

    moe: MoEConfig
    hidden: int
    tp: int

    def gate_up(self, prefix: str, expert: int) -> Source:
        return self._gate_up(prefix, expert, (self.moe.intermediate_size, self.hidden), "")

    def gate_up_bias(self, prefix: str, expert: int) -> Source:
        return self._gate_up(prefix, expert, (self.moe.intermediate_size,), "_bias")

    def _gate_up(self, prefix: str, expert: int, shape: tuple[int, ...], kind: str) -> Source:
        names = self.moe.tensors
        gate, up = (prefix + name.format(expert=expert) + kind for name in (names.gate, names.up))
        turns = (0, 1) if names.fused else ()
        return gate_up_source(gate, up, shape, self.tp, tuple(self._entry(expert, turn) for turn in turns))

    def down(self, prefix: str, expert: int) -> Source:
        name = prefix + self.moe.tensors.down.format(expert=expert)
        source = Source.padded(name, (self.hidden, self.moe.intermediate_size), self.tp, dim=1)
        return replace(source, entries=(self._entry(expert),)) if self.moe.tensors.fused else source

    def down_bias(self, prefix: str, expert: int) -> Source:
        source = Source.whole(prefix + self.moe.tensors.down.format(expert=expert) + "_bias", (self.hidden,))
        return replace(source, entries=(self._entry(expert),)) if self.moe.tensors.fused else source

    def _entry(self, expert: int, turn: int | None = None) -> Entry:
        return Entry(expert, self.moe.num_experts, turn)
