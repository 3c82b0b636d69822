"""The model left to XLA's partitioner: plain `jit` in the global view, where only `in_shardings` say what is split.

It is what a careful user writes, and gets every help that costs no line of communication:

- the same modules and functions as the step programs (norms, rotation, attention tiles, cache, sampling);
- weights sharded as theirs, but q, k, v, gate and up apart: fused ones lie rank by rank, which the global view cannot
  say, and cut at other places they would be exchanged on every call;
- the cache with heads as a dimension of its own (the step programs gather rows of (head, page), which a partitioner
  cannot tell apart), and the replicas' lanes and pages as a leading dimension that is mapped over: page ids then stay
  within a replica, where a global gather would move the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.attention import local
from jaxpar.attention.bind import bound
from jaxpar.attention.cache import Cache
from jaxpar.attention.store import PagedStore
from jaxpar.batch import StepBatch, StepOutput
from jaxpar.checkpoint.config import ModelConfig
from jaxpar.checkpoint.load import load_weights
from jaxpar.checkpoint.reader import TensorReader
from jaxpar.collectives import all_sum
from jaxpar.nn.context import StepContext
from jaxpar.nn.decoder import Decoder
from jaxpar.nn.linear import ColumnParallel
from jaxpar.nn.rope import angles
from jaxpar.nn.weights import Source, weight
from jaxpar.plan import Phase, Plan
from jaxpar.program import Programs, Weights
from jaxpar.vocabulary.head import local_logits
from jaxpar.vocabulary.sampling import sample


class Apart(nnx.Module):
    """Projections of one input with a weight each, in the place of one fused weight; heads of `size` are apart, too."""

    def __init__(self, tensors: Sequence[str], rows: Sequence[int], columns: int, size: int | None = None) -> None:
        self.size = size
        self.each = nnx.List(
            ColumnParallel(weight((Source.whole(name, (count, columns)),), (("tp",), None), "float32", 0.02, ()), None)
            for name, count in zip(tensors, rows, strict=True)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """The modules cut this exactly where it is joined, and XLA removes both."""
        parts = [projection(x) for projection in self.each]
        if self.size is not None:
            parts = [part.reshape(part.shape[0], -1, self.size) for part in parts]
        return jnp.concatenate(parts, axis=1)


class HeadsApart(PagedStore):
    """Pages gathered and written under each head."""

    def _scatter(self, plane: jax.Array, new: jax.Array) -> jax.Array:
        picked = jnp.take_along_axis(new, self._token.reshape(new.shape[0], -1, 1, 1), axis=1).transpose(2, 0, 1, 3)
        picked = picked.reshape(plane.shape[0], *self._token.shape, plane.shape[-1])

        def write(plane: jax.Array, picked: jax.Array) -> jax.Array:
            merged = jnp.where(self._is_new[..., None], picked, plane.at[self._pages].get(mode="clip"))
            return plane.at[self._pages].set(merged, mode="drop")

        return jax.vmap(write)(plane, picked)

    def _gather(self, plane: jax.Array) -> jax.Array:
        bag = jax.vmap(lambda plane: plane.at[self._table].get(mode="clip"))(plane)
        return bag.reshape(*bag.shape[:2], -1, bag.shape[-1])


class Automatic:
    """The model in the global view, compiled by plain `jit`."""

    def __init__(self, config: ModelConfig, explicit: Plan, mesh: Mesh) -> None:
        self.config, self.mesh, self.replicas = config, mesh, explicit.mesh.dp
        self.plan = Plan(chunk=explicit.chunk, page_size=explicit.page_size)
        self.axis = "dp" if self.replicas > 1 else None
        model = Decoder(config, self.plan)
        queries, keys, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        for layer, slot in enumerate(model.slots):
            name = f"model.layers.{layer}"
            slot.attention.qkv = Apart(
                [f"{name}.self_attn.{which}_proj.weight" for which in "qkv"],
                [queries * size, keys * size, keys * size],
                config.hidden_size,
                size,
            )
            slot.ffn.gate_up = Apart(
                [f"{name}.mlp.{which}_proj.weight" for which in ("gate", "up")],
                [config.intermediate_size] * 2,
                config.hidden_size,
            )
        self.planes = model.planes
        self._graph, state = nnx.split(model)
        self._variables = {".".join(map(str, path)): (path, variable) for path, variable in nnx.to_flat_state(state)}
        # Apart weights say themselves how they are split; the others are split as the explicit ones.
        specs = {name: variable.spec for name, (_, variable) in self._variables.items()}
        self.specs = specs | {
            name: spec for name, spec in Programs(config, explicit, mesh).weight_specs.items() if name in specs
        }

    def load(self, reader: TensorReader) -> Weights:
        """The weights, sharded."""
        declared = {
            name: variable.replace(variable.get_value(), spec=self.specs[name])
            for name, (_, variable) in self._variables.items()
        }
        return load_weights(declared, reader, self.mesh)

    def arguments(self, cache: Cache, batch: StepBatch) -> tuple[Cache, StepBatch]:
        """Explicit ones with the replicas as a leading dimension: pages and lanes lie replica by replica already."""

        def pages(plane: np.ndarray) -> np.ndarray:
            stages, heads, total, *rest = plane.shape
            split = plane.reshape(stages, heads, self.replicas, total // self.replicas, *rest)
            return np.moveaxis(split, 2, 0)

        def lanes(array: np.ndarray) -> np.ndarray:
            return array.reshape(self.replicas, -1, *array.shape[1:])

        planes = [{name: pages(plane) for name, plane in slot.items()} for slot in cache.planes]
        return Cache(planes, lanes(cache.positions)), jax.tree.map(lanes, batch)

    def shardings(self) -> Any:
        """Of weights, cache and batch."""
        plane = P(self.axis, None, "tp", None, None, None)
        cache = Cache([dict.fromkeys(("k", "v"), plane) for _ in self.planes], P(self.axis))
        specs = (self.specs, cache, P(self.axis))
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs, is_leaf=lambda x: isinstance(x, P))

    def step(self, phase: Phase) -> Any:
        """The jitted step; the cache is donated."""
        weights, cache, batch = self.shardings()
        mapped = jax.vmap(
            lambda weights, cache, batch: self._replica_step(weights, cache, batch, phase),
            in_axes=(None, 0, 0),
            spmd_axis_name=self.axis,
        )
        return jax.jit(mapped, in_shardings=(weights, cache, batch), out_shardings=(cache, batch), donate_argnums=1)

    def _replica_step(self, weights: Weights, cache: Cache, batch: StepBatch, phase: Phase) -> tuple[Cache, StepOutput]:
        config = self.config
        flat = [(path, variable.replace(weights[name])) for name, (path, variable) in self._variables.items()]
        model: Decoder = nnx.merge(self._graph, nnx.from_flat_state(flat))
        lanes, tokens = batch.positions.shape
        store = HeadsApart(cache.positions, batch.table, batch.start[:, 0], batch.positions)
        cos, sin = angles(batch.positions.reshape(-1), config.rope, config.head_dim)
        attention = bound(local.PREFILL, batch.positions, store.key_positions, self.plan, phase)
        context = StepContext(self.plan, phase, batch.positions, cos, sin, store, attention, (), None, all_sum)
        x = model.embedding[...][batch.tokens.reshape(-1)]
        (x,), planes, _ = model([x], cache.planes, [context])
        x = jnp.take_along_axis(x.reshape(lanes, tokens, -1), batch.last[:, None, None], axis=1)[:, 0]
        scores = local_logits(x, model.head_weight[...], config.vocab_size, ())
        token, logprob = sample(scores, config.vocab_size, (), batch.options, sampled=False)
        return Cache(planes, store.positions_plane), StepOutput(token, logprob, None, None, None)
