"""A decoder in the local view: embedding, slots of layers, final norm, vocabulary head.

tokens -> embedding -> [ x + leave(attention(enter(norm(x)))) ; x + leave(ffn(enter(norm(x)))) ] * layers -> norm

Of two half batches (`two_batch_overlap`) each sublayer takes one after the other. All that one needs of the other are
the keys that it has stored in the same layer, so that a backend may send for one while it computes for the other:

    attention A | attention B | FFN A | FFN B | attention A | ...        layer by layer
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
from flax import nnx

from jaxpar.attention.cache import Planes
from jaxpar.checkpoint.config import ModelConfig
from jaxpar.collectives import enter, leave
from jaxpar.moe.record import LayerRecord, added
from jaxpar.nn.attention import Attention
from jaxpar.nn.context import StepContext
from jaxpar.nn.linear import Ring, rms_norm
from jaxpar.nn.mla import MLA
from jaxpar.nn.mlp import MLP
from jaxpar.nn.moe import MoE
from jaxpar.nn.stage import by_stage, prefixes_of
from jaxpar.nn.weights import Source, Weight, weight
from jaxpar.pipeline.stages import Layers, by_kind, slots_of
from jaxpar.plan import Plan, SublayerName


class Slot(nnx.Module):
    """One layer of every pipeline stage: its weights have a leading stage dimension, 1 in the local view.

    Where a stage has no layer its weights are zeros, and rows pass unchanged: it runs the collectives, and skips what
    sends nothing. So it does with one half of a slot that has a dense FFN on some stages and experts on others.
    """

    def __init__(self, config: ModelConfig, plan: Plan, layers: Layers) -> None:
        """Declare the weights of `layers`, one a pipeline stage."""
        self.eps, self.fixed = config.rms_norm_eps, plan.fixed_order
        self.attention_norm = _norm(config, plan, layers, "input_layernorm")
        mla = config.mla
        self.attention = Attention(config, plan, layers) if mla is None else MLA(config, mla, plan, layers)
        self.ffn_norm = _norm(config, plan, layers, "post_attention_layernorm")
        dense, sparse = by_kind(config, layers)
        mlp = None if dense is None else _mlp(config, plan, dense)
        moe = None if config.moe is None or sparse is None else MoE(config, config.moe, plan, sparse)
        self.ffn = mlp if moe is None else moe
        self.dense = None if moe is None else mlp

    def attend(self, x: jax.Array, planes: Planes, step: StepContext) -> tuple[jax.Array, Planes]:
        """Residual rows [R, D] and the layer's cache -> both after the layer's attention."""
        sublayer = step.plan.sublayer("mla" if isinstance(self.attention, MLA) else "attention", step.phase)
        with jax.named_scope(f"attention:{step.reduction.name}"):
            h = rms_norm(x, self.attention_norm[0], self.eps, self.fixed)
            h = enter(h, sublayer, step.positions.size, step.reduction)
            part, planes = self.attention(h, planes, step)
            return x + self.attention.out.add_bias(leave(part, sublayer, step.reduction)), planes

    def feed(self, x: jax.Array, step: StepContext) -> tuple[jax.Array, LayerRecord | None]:
        """Residual rows [R, D] after attention -> after the layer's FFN, and the record of its experts."""
        assert self.ffn is not None
        rows, record = self._through(self.ffn, x, x, step)
        return rows if self.dense is None else self._through(self.dense, x, rows, step)[0], record

    def _through(
        self, ffn: MLP | MoE, x: jax.Array, onto: jax.Array, step: StepContext
    ) -> tuple[jax.Array, LayerRecord | None]:
        """`onto` [R, D] and what an FFN makes of residual rows `x` [R, D], and the record of its experts."""
        plan, phase = step.plan, step.phase
        name: SublayerName = "moe" if isinstance(ffn, MoE) else "ffn"
        sublayer = plan.sublayer(name, phase)
        with jax.named_scope(f"{name}:{step.reduction.name}"):
            h = rms_norm(x, self.ffn_norm[0], self.eps, self.fixed)
            h = enter(h, sublayer, step.positions.size, step.reduction)
            if isinstance(ffn, MoE):
                part, record = ffn(h, step)
                return onto + leave(part, sublayer, step.reduction)[: x.shape[0]], record
            split = tuple(axis for axis in plan.width_of(name, phase) if axis not in plan.width)
            part = ffn(h, split, Ring(sublayer.ring_in, name), Ring(sublayer.ring_out, name))
            return onto + ffn.down.add_bias(leave(part, sublayer, step.reduction)), None


def _mlp(config: ModelConfig, plan: Plan, layers: Layers) -> MLP:
    over = plan.width_of("ffn", "prefill")
    return MLP(config, plan, prefixes_of(layers, "mlp."), config.intermediate_size, over)


class Decoder(nnx.Module):
    """The whole model; abstract until weights are put into it.

    A pipeline has one weight `vocabulary` [stages, V, D] in place of `embedding` and `head`: the first stage's part of
    it is the embedding, the last one's the head (the embedding once more where they are tied), and zeros between.
    """

    def __init__(self, config: ModelConfig, plan: Plan) -> None:
        """Declare every weight of `config` as `plan` shards it."""
        self.eps, self.fixed = config.rms_norm_eps, plan.fixed_order
        table = (config.vocab_size, config.hidden_size)
        names = (
            "model.embed_tokens.weight",
            "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight",
        )
        first, last = (Source.padded(name, table, plan.mesh.tp) for name in names)
        declare = partial(weight, split=(plan.width, None), dtype=plan.dtype, init=0.02)
        is_pipeline = plan.mesh.pp > 1
        between = (first.empty,) * (plan.mesh.pp - 2)
        self.vocabulary = declare((first, *between, last), stages=plan.pipeline) if is_pipeline else None
        self.embedding = None if is_pipeline else declare(first)
        self.slots = nnx.List(Slot(config, plan, layers) for layers in slots_of(config, plan))
        self.norm = weight(Source.whole("model.norm.weight", (config.hidden_size,)), (None,), plan.dtype, "ones")
        self.head = None if is_pipeline or config.tie_word_embeddings else declare(last)

    @property
    def embedding_rows(self) -> jax.Array:
        """The rank's rows [V/tp, D] of the embedding; of stages only the first has them."""
        return self._rows(self.embedding)

    @property
    def head_rows(self) -> jax.Array:
        """The rank's rows [V/tp, D] of the head, the embedding's where they are tied; only the last stage has them."""
        return self._rows(self.embedding if self.head is None else self.head)

    def _rows(self, alone: Weight | None) -> jax.Array:
        """A weight that there is without stages, or what the rank's stage has of the vocabulary."""
        rows: jax.Array = alone[...] if alone is not None else self.vocabulary[0]  # type: ignore[index]
        return rows

    def __call__(
        self, batches: Sequence[jax.Array], planes: list[Planes], steps: Sequence[StepContext]
    ) -> tuple[list[jax.Array], list[Planes], list[LayerRecord]]:
        """Run the layers on one batch, or on two half batches that share a cache.

        Args:
            batches: embedded tokens [R, D] of each.
            planes: the cache.
            steps: of each batch; a later one's store knows the pages that the one before has written.

        Returns:
            Residual rows of each batch, the cache, and the records of all layers with experts, those of both batches
            added up.
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
        return rows, updated, records

    def normed(self, rows: jax.Array) -> jax.Array:
        """Residual rows [R, D] after all layers -> what the head works on."""
        return rms_norm(rows, self.norm[...], self.eps, self.fixed)


def _norm(config: ModelConfig, plan: Plan, layers: Layers, name: str) -> Weight:
    sources = by_stage(
        prefixes_of(layers, f"{name}.weight"), lambda tensor: Source.whole(tensor, (config.hidden_size,))
    )
    return weight(sources, (None,), plan.dtype, "ones", plan.pipeline)
