"""The dense gated FFN (SwiGLU, arXiv:2002.05202) on a rank's slice of the width."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.checkpoint.config import ModelConfig
from jaxpar.fixed import by_row
from jaxpar.nn.linear import NO_RING, ColumnParallel, Ring, RowParallel, share_of
from jaxpar.nn.stage import Prefixes, by_stage, presence
from jaxpar.nn.weights import Block, Entry, Source, residual_std, weight
from jaxpar.pipeline.present import on_stages
from jaxpar.plan import Plan


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x)); gate and up are one weight, rank by rank [its gate rows, its up rows]."""

    def __init__(self, config: ModelConfig, plan: Plan, prefixes: Prefixes, width: int, over: tuple[str, ...]) -> None:
        """Declare the weights of a slot.

        Args:
            config: of the model.
            plan: to run it by.
            prefixes: of the tensors' names, one a pipeline stage.
            width: of the hidden layer.
            over: the axes that split it.
        """
        tp, stages, dtype = plan.mesh.extent(over), plan.pipeline, plan.dtype
        hidden, out_std = config.hidden_size, residual_std(config.num_hidden_layers)
        self.present, self.pipeline = presence(prefixes), stages

        def gate_up(kind: str, prefix: str) -> Source:
            shape = (width,) if kind == "bias" else (width, hidden)
            return gate_up_source(f"{prefix}gate_proj.{kind}", f"{prefix}up_proj.{kind}", shape, tp)

        self.gate_up = ColumnParallel(
            weight(by_stage(prefixes, partial(gate_up, "weight")), (over, None), dtype, 0.02, stages),
            weight(by_stage(prefixes, partial(gate_up, "bias")), (over,), dtype, "zeros", stages)
            if config.mlp_bias
            else None,
            plan.fixed_order,
        )
        downs = by_stage(prefixes, lambda name: Source.padded(f"{name}down_proj.weight", (hidden, width), tp, dim=1))
        biases = by_stage(prefixes, lambda name: Source.whole(f"{name}down_proj.bias", (hidden,)))
        self.down = RowParallel(
            weight(downs, (None, over), dtype, out_std, stages),
            weight(biases, (None,), dtype, "zeros", stages) if config.mlp_bias else None,
            plan.fixed_order,
        )

    def __call__(
        self, x: jax.Array, split: tuple[str, ...], ring_in: Ring = NO_RING, ring_out: Ring = NO_RING
    ) -> jax.Array:
        """[T, D] -> a partial sum of [T, D] over tp, and over the axes `split`, whose ranks share the rank's width.

        Over rings `x` is a slice of the tokens, and so is what comes of it, summed over them; nothing is split then.
        """
        return on_stages(self.present, self.pipeline, lambda: self._part(x, split, ring_in, ring_out))

    def _part(self, x: jax.Array, split: tuple[str, ...], ring_in: Ring, ring_out: Ring) -> jax.Array:
        if not split:
            both = self.gate_up(x, ring_in)
            width = both.shape[1] // 2
            hidden = by_row(gated, both[:, :width], both[:, width:], fixed=self.down.fixed)
            return self.down(hidden.astype(x.dtype), ring_out)
        width = self.gate_up.weight[0].shape[0] // 2
        mine = share_of(width, split)
        gate, up = (self.gate_up.rows(x, share) for share in (mine, mine.offset_by(width)))
        own = jnp.arange(mine.count)[None, :] >= mine.skip
        return self.down.columns(
            jnp.where(own, by_row(gated, gate, up, fixed=self.down.fixed), 0.0).astype(x.dtype), mine
        )


def gate_up_source(gate: str, up: str, shape: tuple[int, ...], tp: int, entries: tuple[Entry, ...] = ()) -> Source:
    """A gate and an up projection, each of `shape`, or their biases: rank by rank of `tp` the rows of both."""
    rows = -(-shape[0] // tp)
    blocks = tuple(Block(tensor, rank * rows, rows) for rank in range(tp) for tensor in (0, 1))
    return Source((gate, up), (shape, shape), blocks, entries=entries)


def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    """SwiGLU's hidden values."""
    return jax.nn.silu(gate) * up
