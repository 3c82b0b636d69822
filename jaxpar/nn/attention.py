"""Grouped-query attention of one layer on a rank's heads."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.attention import head_dim
from jaxpar.attention.cache import Planes
from jaxpar.attention.inputs import Inputs
from jaxpar.attention.partial import NO_WINDOW
from jaxpar.checkpoint.config import ModelConfig
from jaxpar.heads import HeadLayout, heads_of
from jaxpar.nn.context import StepContext
from jaxpar.nn.linear import ColumnParallel, Ring, rms_norm, share_of
from jaxpar.nn.output import OutputProjection, head_block, head_slice
from jaxpar.nn.rope import rotate
from jaxpar.nn.stage import Prefixes, by_stage, own_value, prefixes_of, presence
from jaxpar.nn.weights import Block, Source, Weight, weight
from jaxpar.pipeline.present import on_stages
from jaxpar.pipeline.stages import Layers
from jaxpar.plan import Plan


class Attention(nnx.Module):
    """Projections, q/k norms, rotation, cache and attention; returns partial sums over tp of the output.

    Query, key and value projections are one weight, rank by rank [its queries, its keys, its values].
    """

    def __init__(self, config: ModelConfig, plan: Plan, layers: Layers) -> None:
        """Declare the weights of the slot that holds `layers`, one a pipeline stage."""
        self.heads = heads_of(config, plan)
        self.head_dim = config.head_dim
        self.eps = config.rms_norm_eps
        self.windows = _windows(config, layers)
        names = prefixes_of(layers, "self_attn.")
        self.present = presence(names)
        tp, stages, dtype = plan.width, plan.pipeline, plan.dtype
        self.qkv = ColumnParallel(
            weight(by_stage(names, partial(_qkv, config, self.heads, "weight")), (tp, None), dtype, 0.02, stages),
            weight(by_stage(names, partial(_qkv, config, self.heads, "bias")), (tp,), dtype, "zeros", stages)
            if config.qkv_bias
            else None,
            plan.fixed_order,
        )
        self.out = OutputProjection(config, plan, self.heads, layers)
        self.q_norm = _head_norm(config, plan, self.heads, names, "q_norm")
        self.k_norm = _head_norm(config, plan, self.heads, names, "k_norm")
        self.sinks = (
            weight(by_stage(names, partial(_sinks, config, self.heads)), (tp,), dtype, "zeros", stages)
            if config.sinks
            else None
        )

    def __call__(self, x: jax.Array, planes: Planes, step: StepContext) -> tuple[jax.Array, Planes]:
        """Tokens [B * T, D] and the layer's cache -> a partial sum of [B * T, D], and the cache with them in it."""
        where_present = partial(on_stages, self.present, step.plan.pipeline)
        q, k, v = where_present(lambda: self._project(x, step))
        lanes, tokens = step.positions.shape
        q, k, v = (y.reshape(lanes, tokens, *y.shape[1:]) for y in (q, k, v))
        planes, bag = step.store.update(planes, {"k": k, "v": v})

        def attended() -> jax.Array:
            keys = bag()
            inputs = Inputs(
                q,
                (keys["k"], keys["v"]),
                step.positions,
                step.store.key_positions,
                None if self.windows is None else own_value(self.windows, step.plan.pipeline),
                self.head_dim**-0.5,
                self.heads.group,
                sinks=None if self.sinks is None else self.sinks[0].astype(jnp.float32),
                groups=self.heads.groups,
                fixed=step.phase if step.plan.fixed_order else None,
                pages=step.store.pages(planes) if step.phase == "decode" else None,
            )
            return step.attention(inputs)

        heads = where_present(attended)
        return where_present(lambda: self.out.of_heads(heads, step, x.dtype)), planes

    def _project(self, x: jax.Array, step: StepContext) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Tokens [B * T, D], or a slice of them -> rotated queries [B * T, H, d] (or a share of H) and keys, values."""
        fixed = step.plan.fixed_order
        kv, heads, size = self.heads.kv_local, self.heads.q_local, self.heads.slice_of(self.head_dim)
        if step.query_axes:
            q = self.qkv.rows(x, share_of(heads, step.query_axes).scaled(size))
            both = self.qkv.last_rows(x, 2 * kv * size)
        else:
            ring = Ring(step.plan.sublayer("attention", step.phase).ring_in, "attention")
            together = self.qkv(x, ring)[: step.positions.size]
            q, both = together[:, : heads * size], together[:, heads * size :]
        k, v = both[:, : kv * size], both[:, kv * size :]
        q, k, v = (y.reshape(step.positions.size, -1, size) for y in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None:
            of_q, of_k = head_dim.mean_squares(q, k, step.plan, step.phase, self.heads, self.head_dim)
            q = rms_norm(q, self.q_norm[0], self.eps, fixed, of_q)
            k = rms_norm(k, self.k_norm[0], self.eps, fixed, of_k)
        q, k = (rotate(y, step.cos, step.sin, fixed=fixed) for y in (q, k))
        return q.astype(x.dtype), k.astype(x.dtype), v.astype(x.dtype)


def _windows(config: ModelConfig, layers: Layers) -> tuple[int, ...] | None:
    """The window of each stage, None where no layer has one; a stage without a layer does as another."""
    windows = [None if layer is None else config.windows[layer] for layer in layers]
    some = next((window for window in windows if window is not None), None)
    if some is None:
        return None
    sizes = (some if layer is None else window or NO_WINDOW for layer, window in zip(layers, windows, strict=True))
    return tuple(sizes)


def _qkv(config: ModelConfig, heads: HeadLayout, kind: str, prefix: str) -> Source:
    size = config.head_dim
    counts = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
    columns = () if kind == "bias" else (config.hidden_size,)
    blocks: list[Block] = []
    for rank in range(heads.tp):
        for tensor, order, local in ((0, heads.q_heads, heads.q_local), (1, heads.kv_heads, heads.kv_local),
                                     (2, heads.kv_heads, heads.kv_local)):  # fmt: skip
            for head in order[rank * local : (rank + 1) * local]:
                blocks += head_slice(tensor, head, size, heads, rank, paired=tensor < 2)
    return Source(
        tuple(f"{prefix}{name}_proj.{kind}" for name in "qkv"),
        tuple((count * size, *columns) for count in counts),
        tuple(blocks),
    )


def _sinks(config: ModelConfig, heads: HeadLayout, prefix: str) -> Source:
    blocks = tuple(head_block(0, head, 1) for head in heads.q_heads)
    return Source((f"{prefix}sinks",), ((config.num_attention_heads,),), blocks)


def _head_norm(config: ModelConfig, plan: Plan, heads: HeadLayout, names: Prefixes, which: str) -> Weight | None:
    """The scale of the norm of every head: the same on all ranks, or each rank's slice where heads are split inside."""
    if not config.qk_norm:
        return None
    size, split = config.head_dim, heads.parts > 1
    ranks = range(heads.tp if split else 1)
    blocks = tuple(block for rank in ranks for block in head_slice(0, 0, size, heads, rank, paired=True))
    sources = by_stage(names, lambda name: Source((f"{name}{which}.weight",), ((size,),), blocks))
    return weight(sources, (plan.width if split else None,), plan.dtype, "ones", plan.pipeline)
