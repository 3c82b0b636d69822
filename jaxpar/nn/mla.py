"""Multi-head latent attention of one layer on a rank's heads (DeepSeek-V2, arXiv:2405.04434).

    x -+-> query latent [r_q] -> norm -> queries of the rank's heads [H, d_n + d_p]     (or straight from x)
       +-> latent       [r]   -> norm -> cache -+
       +-> rotated key  [d_p] ---------> cache -+-> attention of the rank's heads -> output projection

The projections of x are one weight, the same on every rank of tp, and so is the cache: what all heads share cannot be
split by heads. Everything after them lies over tp by heads. `attention/latent.py` has what is made of the cache.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.attention.cache import Planes
from jaxpar.attention.inputs import Inputs
from jaxpar.attention.latent import Latent
from jaxpar.checkpoint.config import MLAConfig, ModelConfig
from jaxpar.heads import HeadLayout, heads_of
from jaxpar.kernels.dense import matmul
from jaxpar.nn.context import StepContext
from jaxpar.nn.linear import ColumnParallel, rms_norm, share_of
from jaxpar.nn.output import OutputProjection, head_block
from jaxpar.nn.rope import rotate
from jaxpar.nn.stage import by_stage, prefixes_of, presence
from jaxpar.nn.weights import Block, Source, Weight, weight
from jaxpar.pipeline.present import on_stages
from jaxpar.pipeline.stages import Layers
from jaxpar.plan import Plan


class MLA(nnx.Module):
    """Projections through latents, their norms, rotation, cache and attention; returns partial sums over tp.

    Prefill makes keys and values of the latents for the rank's heads, decode absorbs the matrices that would make them.
    """

    def __init__(self, config: ModelConfig, mla: MLAConfig, plan: Plan, layers: Layers) -> None:
        """Declare the weights of the slot that holds `layers`, one a pipeline stage."""
        self.mla, self.heads = mla, heads_of(config, plan)
        self.interleaved, self.scale = config.rope.interleaved, mla.scale_factor * config.head_dim**-0.5
        names = prefixes_of(layers, "self_attn.")
        self.present = presence(names)
        tp, stages, dtype = plan.width, plan.pipeline, plan.dtype
        hidden, rank = config.hidden_size, mla.q_lora_rank

        def norm(kind: str, size: int) -> Weight:
            sources = by_stage(names, lambda name: Source.whole(f"{name}{kind}_layernorm.weight", (size,)))
            return weight(sources, (None,), dtype, "ones", stages)

        def over_heads(kind: str, size: int, columns: int) -> Weight:
            sources = by_stage(
                names, lambda name: _rows_of_heads(config, self.heads, f"{name}{kind}.weight", size, columns)
            )
            return weight(sources, (tp, None), dtype, 0.02, stages)

        self.latents = weight(by_stage(names, partial(_latents, mla, hidden)), (None, None), dtype, 0.02, stages)
        self.q_norm = None if rank is None else norm("q_a", rank)
        self.kv_norm = norm("kv_a", mla.kv_lora_rank)
        self.q = ColumnParallel(
            over_heads("q_proj" if rank is None else "q_b_proj", config.head_dim, hidden if rank is None else rank),
            None,
            plan.fixed_order,
        )
        self.kv_up = over_heads("kv_b_proj", mla.qk_nope_head_dim + mla.v_head_dim, mla.kv_lora_rank)
        self.out = OutputProjection(config, plan, self.heads, layers)

    def __call__(self, x: jax.Array, planes: Planes, step: StepContext) -> tuple[jax.Array, Planes]:
        """Tokens [B * T, D] and the layer's cache -> a partial sum of [B * T, D], and the cache with them in it."""
        lanes, tokens = step.positions.shape
        where_present = partial(on_stages, self.present, step.plan.pipeline)
        projected = where_present(lambda: self._project(x, step))
        q, latent, rope = (y.reshape(lanes, tokens, *y.shape[1:]) for y in projected)
        planes, bag = step.store.update(planes, {"latent": latent, "rope": rope})

        def attended() -> jax.Array:
            keys, up = bag(), self.kv_up[0].reshape(self.heads.kv_local, -1, self.mla.kv_lora_rank)
            inputs = Inputs(
                q,
                (keys["latent"], keys["rope"]),
                step.positions,
                step.store.key_positions,
                None,
                self.scale,
                self.heads.group,
                latent=Latent(up, self.mla.qk_nope_head_dim, absorbed=step.phase == "decode"),
                fixed=step.phase if step.plan.fixed_order else None,
            )
            return step.attention(inputs)

        heads = where_present(attended)
        return where_present(lambda: self.out.of_heads(heads, step, x.dtype)), planes

    def _project(self, x: jax.Array, step: StepContext) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Tokens [B * T, D] -> queries [B * T, H, d] (or a share of H), latents [B * T, 1, r], keys [B * T, 1, d_p]."""
        mla = self.mla
        rank = mla.q_lora_rank or 0
        fixed = step.plan.fixed_order
        together = matmul(x, self.latents[0], fixed)
        q_latent, latent, rope = jnp.split(together, (rank, rank + mla.kv_lora_rank), axis=1)
        latent = rms_norm(latent, self.kv_norm[0], mla.norm_eps, fixed)
        if self.q_norm is not None:
            q = self._queries(rms_norm(q_latent, self.q_norm[0], mla.norm_eps, fixed).astype(x.dtype), step)
        else:
            q = self._queries(x, step)
        rope = rotate(rope[:, None], step.cos, step.sin, self.interleaved, step.plan.fixed_order)
        return q.astype(x.dtype), latent[:, None].astype(x.dtype), rope.astype(x.dtype)

    def _queries(self, x: jax.Array, step: StepContext) -> jax.Array:
        """Their latents [B * T, r_q], or the tokens themselves -> the queries of the rank's heads, rotated."""
        nope, size = self.mla.qk_nope_head_dim, self.mla.qk_nope_head_dim + self.mla.qk_rope_head_dim
        axes = step.query_axes
        q = self.q.rows(x, share_of(self.heads.q_local, axes).scaled(size)) if axes else self.q(x)
        q = q.reshape(x.shape[0], -1, size)
        rope = rotate(q[..., nope:], step.cos, step.sin, self.interleaved, step.plan.fixed_order)
        return jnp.concatenate([q[..., :nope], rope], axis=2)


def _latents(mla: MLAConfig, hidden: int, prefix: str) -> Source:
    """[query latent, latent, rotated key] of D columns."""
    tensors = {"kv_a_proj_with_mqa": mla.kv_lora_rank + mla.qk_rope_head_dim}
    if mla.q_lora_rank is not None:
        tensors = {"q_a_proj": mla.q_lora_rank} | tensors
    return Source(
        tuple(f"{prefix}{name}.weight" for name in tensors),
        tuple((rows, hidden) for rows in tensors.values()),
        tuple(Block(tensor, 0, rows) for tensor, rows in enumerate(tensors.values())),
    )


def _rows_of_heads(config: ModelConfig, heads: HeadLayout, tensor: str, size: int, columns: int) -> Source:
    """`size` rows a head, dealt over tp."""
    blocks = tuple(head_block(0, head, size) for head in heads.q_heads)
    return Source((tensor,), ((config.num_attention_heads * size, columns),), blocks)
