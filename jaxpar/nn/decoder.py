"""A decoder in the local view: embedding, slots of layers, final norm, vocabulary head.

tokens -> embedding -> [ x + leave(attention(enter(norm(x)))) ; x + leave(ffn(enter(norm(x)))) ] * layers -> norm

Of two half batches (`two_batch_overlap`) each sublayer takes one after the other. All that one needs of the other are
the keys that it has stored in the same layer, so that a backend may send for one while it computes for the other:

    attention A | attention B | FFN A | FFN B | attention A | ...        layer by layer
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from flax import nnx

from jaxpar.attention.cache import Planes
from jaxpar.checkpoint.config import ModelConfig
from jaxpar.collectives import enter, leave
from jaxpar.errors import PlanError
from jaxpar.moe.record import LayerRecord, added
from jaxpar.nn.attention import Attention
from jaxpar.nn.context import StepContext
from jaxpar.nn.linear import Ring, rms_norm
from jaxpar.nn.mla import MLA
from jaxpar.nn.mlp import MLP
from jaxpar.nn.moe import MoE
from jaxpar.nn.weights import Source, Weight, weight
from jaxpar.plan import Plan, SublayerName


class Slot(nnx.Module):
    """One layer of every pipeline stage: its weights have a leading stage dimension, 1 in the local view."""

    def __init__(self, config: ModelConfig, plan: Plan, layers: tuple[int, ...]) -> None:
        """Declare the weights of `layers`, one a pipeline stage."""
        self.eps = config.rms_norm_eps
        self.attention_norm = _norm(config, plan, layers, "input_layernorm")
        mla = config.mla
        self.attention = Attention(config, plan, layers) if mla is None else MLA(config, mla, plan, layers)
        self.ffn_norm = _norm(config, plan, layers, "post_attention_layernorm")
        self.ffn = _ffn(config, plan, layers)

    def attend(self, x: jax.Array, planes: Planes, step: StepContext) -> tuple[jax.Array, Planes]:
        """Residual rows [R, D] and the layer's cache -> both after the layer's attention."""
        sublayer = step.plan.sublayer("mla" if isinstance(self.attention, MLA) else "attention", step.phase)
        with jax.named_scope(f"attention:{step.reduction.name}"):
            h = enter(rms_norm(x, self.attention_norm[0], self.eps), sublayer, step.positions.size, step.reduction)
            part, planes = self.attention(h, planes, step)
            return x + self.attention.out.add_bias(leave(part, sublayer, step.reduction)), planes

    def feed(self, x: jax.Array, step: StepContext) -> tuple[jax.Array, LayerRecord | None]:
        """Residual rows [R, D] after attention -> after the layer's FFN, and the record of its experts."""
        plan, phase = step.plan, step.phase
        name: SublayerName = "moe" if isinstance(self.ffn, MoE) else "ffn"
        sublayer = plan.sublayer(name, phase)
        with jax.named_scope(f"{name}:{step.reduction.name}"):
            h = enter(rms_norm(x, self.ffn_norm[0], self.eps), sublayer, step.positions.size, step.reduction)
            split = tuple(axis for axis in plan.width_of(name, phase) if axis not in plan.width)
            if isinstance(self.ffn, MoE):
                part, record = self.ffn(h, split, step)
                return x + leave(part, sublayer, step.reduction)[: x.shape[0]], record
            part = self.ffn(h, split, Ring(sublayer.ring_in, name), Ring(sublayer.ring_out, name))
            return x + self.ffn.down.add_bias(leave(part, sublayer, step.reduction)), None


def _ffn(config: ModelConfig, plan: Plan, layers: tuple[int, ...]) -> MLP | MoE:
    """The FFN of the slot that holds `layers`, one a pipeline stage: all dense or all with experts."""
    held = [layer for layer in layers if layer < config.num_hidden_layers]
    if config.moe is None or not any(config.moe.layers[layer] for layer in held):
        prefixes = tuple(f"model.layers.{layer}.mlp." for layer in layers)
        return MLP(config, plan, prefixes, config.intermediate_size, plan.width_of("ffn", "prefill"))
    if not all(config.moe.layers[layer] for layer in held):
        raise PlanError(
            f"pp={plan.mesh.pp} puts layers {', '.join(map(str, held))} into one slot, and some of them have "
            f"experts and others not: choose a pp that aligns them"
        )
    return MoE(config, config.moe, plan, layers)


class Decoder(nnx.Module):
    """The whole model; abstract until weights are put into it."""

    def __init__(self, config: ModelConfig, plan: Plan) -> None:
        """Declare every weight of `config` as `plan` shards it."""
        self.eps = config.rms_norm_eps
        table = (config.vocab_size, config.hidden_size)
        split = (plan.width, None)
        tensor = "model.embed_tokens.weight"
        self.embedding = weight(Source.padded(tensor, table, plan.mesh.tp), split, plan.dtype, 0.02)
        stages, slots = plan.mesh.pp, -(-config.num_hidden_layers // plan.mesh.pp)
        self.slots = nnx.List(
            Slot(config, plan, tuple(stage * slots + slot for stage in range(stages))) for slot in range(slots)
        )
        self.norm = weight(Source.whole("model.norm.weight", (config.hidden_size,)), (None,), plan.dtype, "ones")
        self.head = (
            None
            if config.tie_word_embeddings
            else weight(Source.padded("lm_head.weight", table, plan.mesh.tp), split, plan.dtype, 0.02)
        )

    @property
    def head_weight(self) -> Weight:
        """The vocabulary head's rows [V/tp, D]: the embedding's where they are tied."""
        return self.embedding if self.head is None else self.head

    def __call__(
        self, batches: Sequence[jax.Array], planes: list[Planes], steps: Sequence[StepContext]
    ) -> tuple[list[jax.Array], list[Planes], list[LayerRecord]]:
        """Run the layers on one batch, or on two half batches that share a cache.

        Args:
            batches: embedded tokens [R, D] of each.
            planes: the cache.
            steps: of each batch; a later one's store knows the pages that the one before has written.

        Returns:
            Hidden states of each batch after the final norm, the cache, and the records of all layers with experts,
            those of both batches added up.
        """
        rows, updated, records = list(batches), [], []
        for index, (slot, slot_planes) in enumerate(zip(self.slots, planes, strict=True)):
            with jax.named_scope(f"layer_{index}"):
                for batch, step in enumerate(steps):
                    rows[batch], slot_planes = slot.attend(rows[batch], slot_planes, step)
                fed = [slot.feed(x, step) for x, step in zip(rows, steps, strict=True)]
            rows = [x for x, _ in fed]
            updated.append(slot_planes)
            of_layer = [record for _, record in fed if record is not None]
            records += [added(of_layer)] if of_layer else []
        return [rms_norm(x, self.norm[...], self.eps) for x in rows], updated, records


def _norm(config: ModelConfig, plan: Plan, layers: tuple[int, ...], name: str) -> Weight:
    sources = tuple(Source.whole(f"model.layers.{layer}.{name}.weight", (config.hidden_size,)) for layer in layers)
    return weight(sources, (None,), plan.dtype, "ones", plan.stages)
