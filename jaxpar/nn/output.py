"""The output projection of attention: a rank's heads back to a partial sum of the residual stream."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.checkpoint.config import ModelConfig
from jaxpar.heads import PADDED, HeadLayout
from jaxpar.nn.context import StepContext
from jaxpar.nn.linear import Ring, RowParallel, share_of
from jaxpar.nn.stage import by_stage, prefixes_of
from jaxpar.nn.weights import ZEROS, Block, Source, residual_std, weight
from jaxpar.pipeline.stages import Layers
from jaxpar.plan import Plan


class OutputProjection(RowParallel):
    """[B, T, H, d] -> a partial sum of [B * T, D]; each rank holds the columns of its query heads, or of slices."""

    def __init__(self, config: ModelConfig, plan: Plan, heads: HeadLayout, layers: Layers) -> None:
        """Declare `o_proj` of the slot that holds `layers`, one a pipeline stage."""
        names = prefixes_of(layers, "self_attn.o_proj.")
        size, stages, dtype = config.v_head_dim, plan.pipeline, plan.dtype
        shape = (config.hidden_size, config.num_attention_heads * size)
        blocks = tuple(
            block
            for rank in range(heads.tp)
            for head in heads.q_heads[rank * heads.q_local : (rank + 1) * heads.q_local]
            for block in head_slice(0, head, size, heads, rank)
        )
        columns = by_stage(names, lambda name: Source((f"{name}weight",), (shape,), blocks, dim=1))
        biases = by_stage(names, lambda name: Source.whole(f"{name}bias", (config.hidden_size,)))
        super().__init__(
            weight(columns, (None, plan.width), dtype, residual_std(config.num_hidden_layers), stages),
            weight(biases, (None,), dtype, "zeros", stages) if config.o_bias else None,
            plan.fixed_order,
        )
        self.q_local = heads.q_local

    def of_heads(self, out: jax.Array, step: StepContext, dtype: jnp.dtype) -> jax.Array:
        """Project what attention gives: all heads of the rank, or in decode over cp a share of them."""
        lanes, tokens, _, size = out.shape
        out = out.astype(dtype).reshape(lanes * tokens, -1, size)
        if step.phase == "decode" and step.plan.sequence:
            return self._share(out, step.plan.sequence)
        ring = Ring(step.plan.sublayer("attention", step.phase).ring_out, "attention")
        return self(out.reshape(lanes * tokens, -1), ring)

    def _share(self, out: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        """Project the heads [B * T, H/n, d] that decode leaves a rank of `axes` with."""
        mine = share_of(self.q_local, axes)
        # Zeros for heads at the front of the share that belong to the ranks before, and the rank's own after them.
        behind = jnp.concatenate([jnp.zeros_like(out), out], axis=1)
        own = lax.dynamic_slice_in_dim(behind, mine.count - mine.skip, mine.count, axis=1)
        return self.columns(own.reshape(out.shape[0], -1), mine.scaled(out.shape[2]))


def head_block(tensor: int, head: int, size: int) -> Block:
    """The rows or columns of a head of `size` in tensor number `tensor`; zeros for padding."""
    return Block(ZEROS, 0, size) if head == PADDED else Block(tensor, head * size, size)


def head_slice(
    tensor: int, head: int, size: int, heads: HeadLayout, rank: int, paired: bool = False
) -> tuple[Block, ...]:
    """What `rank` has of the rows or columns of a head: all, or where heads are split inside its slice.

    That is one of `parts` in order, or of `paired` dimensions, i and i + size / 2, one of `parts` of both halves.
    """
    if heads.parts == 1:
        return (head_block(tensor, head, size),)
    halves = 2 if paired else 1
    rows, half = size // halves // heads.parts, size // halves
    first = head * size + rank % heads.parts * rows
    return tuple(Block(tensor, first + i * half, rows) for i in range(halves))
