"""The model left to XLA's partitioner: plain `jit` in the global view, where only `in_shardings` say what is split.

It is what a careful user writes, and gets every help that costs no line of communication:

- the same modules and functions as the step programs (norms, rotation, attention tiles, cache, sampling);
- weights sharded as theirs, but q, k, v, gate and up apart: fused ones lie rank by rank, which the global view cannot
  say, and cut at other places they would be exchanged on every call;
- the cache with heads as a dimension of its own (the step programs gather rows of (head, page), which a partitioner
  cannot tell apart), and the replicas' lanes and pages as a leading dimension that is mapped over: page ids then stay
  within a replica, where a global gather would move the cache (`one_pool` is that program).
- sums over tp in the dtype of the rows: a product that keeps float32 until it is rounded is summed in float32.

Where tp is more than the KV heads (`kv`): "size" cuts each head of the cache along its dimensions, "copies" keeps all
of the cache on every rank, "axis" cuts tp into an axis of as many ranks as there are heads and one of copies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.attention import local
from jaxpar.attention.bind import bound
from jaxpar.attention.cache import Cache, cache_shapes
from jaxpar.attention.planes import planes_of
from jaxpar.attention.store import PagedStore
from jaxpar.batch import StepBatch, StepOutput, batch_shapes
from jaxpar.checkpoint.config import ModelConfig
from jaxpar.checkpoint.load import load_weights
from jaxpar.checkpoint.reader import TensorReader
from jaxpar.heads import heads_of
from jaxpar.kernels import backend
from jaxpar.moe.bind import bound as dispatched
from jaxpar.moe.grouped import Activation
from jaxpar.nn import moe
from jaxpar.nn.context import StepContext
from jaxpar.nn.decoder import Decoder
from jaxpar.nn.linear import NO_RING, ColumnParallel, Ring, RowParallel
from jaxpar.nn.mlp import MLP
from jaxpar.nn.output import OutputProjection
from jaxpar.nn.rope import angles
from jaxpar.nn.weights import Source, weight
from jaxpar.pipeline.stages import slots_of
from jaxpar.plan import Phase, Plan
from jaxpar.program import Programs, Weights
from jaxpar.registry import chosen
from jaxpar.strategies import Step
from jaxpar.vocabulary.head import local_logits
from jaxpar.vocabulary.sampling import sample

Split = Literal["size", "copies", "axis"]


class Apart(nnx.Module):
    """Projections of one input with a weight each, in the place of one fused weight."""

    def __init__(self, tensors: Sequence[str], rows: Sequence[int], columns: int, dtype: str) -> None:
        self.each = nnx.List(
            ColumnParallel(weight((Source.whole(name, (count, columns)),), (("tp",), None), dtype, 0.02, ()), None)
            for name, count in zip(tensors, rows, strict=True)
        )

    def __call__(self, x: jax.Array, ring: Ring = NO_RING) -> jax.Array:
        """The modules cut this exactly where it is joined, and XLA removes both."""
        return jnp.concatenate([projection(x) for projection in self.each], axis=1)


def _rounded(x: jax.Array, weight: jax.Array) -> jax.Array:
    return lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=x.dtype)


class RoundedRows(RowParallel):
    """Sums are made of what is rounded."""

    def __call__(self, x: jax.Array, ring: Ring = NO_RING) -> jax.Array:
        """[T, I] -> [T, O]."""
        return _rounded(x, self.weight[0])


class RoundedOutput(OutputProjection):
    """The same after attention."""

    def __call__(self, x: jax.Array, ring: Ring = NO_RING) -> jax.Array:
        """[T, I] -> [T, O]."""
        return _rounded(x, self.weight[0])


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


def _with_copies(mesh: Mesh, copies: int) -> Mesh:
    """The mesh with tp, its last axis, cut into tp and copies."""
    *outer, tp = mesh.devices.shape
    names = (*mesh.axis_names, "copies")
    return Mesh(mesh.devices.reshape(*outer, tp // copies, copies), names, axis_types=(AxisType.Auto,) * len(names))


def _of_kv(name: str) -> bool:
    """Whether a weight projects to keys or values, of which ranks of copies have the same."""
    return "qkv.each.1" in name or "qkv.each.2" in name


def _over_copies(spec: P) -> P:
    """Split over tp -> over tp and copies."""
    axes = [(axis,) if isinstance(axis, str) else axis for axis in spec]
    return P(*(axis and (*axis, *(("copies",) if "tp" in axis else ())) for axis in axes))


@contextmanager
def no_kernels() -> Iterator[None]:
    """Within it programs hold what every backend can run: XLA partitions no kernel that is written for one."""
    with patch.object(backend, "platform_of_mesh", lambda: "cpu"), patch.object(moe, "expert_ffn", _ragged_ffn):
        yield


def _ragged_ffn(
    rows: jax.Array, gate_up: jax.Array, down: jax.Array, counts: jax.Array, activation: Activation, *biases: None
) -> jax.Array:
    """`expert_ffn` without biases by `jax.lax.ragged_dot`, which every backend has."""
    numbers = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
    product = partial(lax.ragged_dot_general, ragged_dot_dimension_numbers=numbers, preferred_element_type=jnp.float32)
    both, width = product(rows, gate_up, counts), gate_up.shape[1] // 2
    return product(activation(both[:, :width], both[:, width:]).astype(rows.dtype), down, counts)


class Automatic:
    """The model in the global view, compiled by plain `jit`."""

    def __init__(
        self, config: ModelConfig, explicit: Plan, mesh: Mesh, one_pool: bool = False, kv: Split = "size"
    ) -> None:
        """Declare it with the shards of `explicit`; `one_pool`: replicas share one pool, ids count all its pages."""
        self.config, self.explicit = config, explicit
        heads, tp = config.num_key_value_heads, explicit.mesh.tp
        copies = tp // math.gcd(tp, heads) if kv == "axis" else 1
        self.mesh = mesh if copies == 1 else _with_copies(mesh, copies)
        aligned = heads % (tp // copies) == 0
        self.of_heads, self.of_size = ("tp", None) if aligned else (None, "tp" if kv == "size" else None)
        self.replicas = 1 if one_pool else explicit.mesh.dp
        self.axis = "dp" if self.replicas > 1 else None
        self.pooled = "dp" if one_pool else None
        self.plan = Plan(chunk=explicit.chunk, page_size=explicit.page_size, dtype=explicit.dtype)
        model = Decoder(config, self.plan)
        queries, keys, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        for layer, (slot, layers) in enumerate(zip(model.slots, slots_of(config, self.plan), strict=True)):
            name = f"model.layers.{layer}"
            slot.attention.qkv = Apart(
                [f"{name}.self_attn.{which}_proj.weight" for which in "qkv"],
                [queries * size, keys * size, keys * size],
                config.hidden_size,
                explicit.dtype,
            )
            slot.attention.out = RoundedOutput(config, self.plan, heads_of(config, self.plan), layers)
            if isinstance(slot.ffn, MLP):
                slot.ffn.down = RoundedRows(slot.ffn.down.weight, slot.ffn.down.bias)
                slot.ffn.gate_up = Apart(
                    [f"{name}.mlp.{which}_proj.weight" for which in ("gate", "up")],
                    [config.intermediate_size] * 2,
                    config.hidden_size,
                    explicit.dtype,
                )
        self.planes = [planes_of(config, self.plan)] * len(model.slots)
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
        """Explicit ones with the replicas as a leading dimension: pages and lanes lie replica by replica already.

        Of `one_pool` that dimension is 1, and the table's ids must count the pages of all replicas.
        """

        def pages(plane: np.ndarray) -> np.ndarray:
            stages, heads, total, *rest = plane.shape
            split = plane.reshape(stages, heads, self.replicas, total // self.replicas, *rest)
            return split.transpose(2, 0, 1, *range(3, split.ndim))

        def lanes(array: np.ndarray) -> np.ndarray:
            return array.reshape(self.replicas, -1, *array.shape[1:])

        planes = [{name: pages(plane) for name, plane in slot.items()} for slot in cache.planes]
        return Cache(planes, lanes(cache.positions)), jax.tree.map(lanes, batch)

    def abstract_arguments(self, step: Step, pages: int) -> tuple[Weights, Cache, StepBatch]:
        """Shapes of weights, cache and batch for a step of the explicit plan, with as many pages on each rank."""
        weights = {name: variable.get_value() for name, (_, variable) in self._variables.items()}
        shapes = cache_shapes(self.planes, pages, self.explicit), batch_shapes(step)
        return weights, *jax.eval_shape(self.arguments, *shapes)

    def shardings(self) -> Any:
        """Of weights, cache and batch."""
        plane = P(self.axis, None, self.of_heads, self.pooled, None, self.of_size)
        cache = Cache([dict.fromkeys(("k", "v"), plane) for _ in self.planes], P(self.axis, self.pooled))
        weights = self.specs
        if "copies" in self.mesh.shape:
            weights = {name: spec if _of_kv(name) else _over_copies(spec) for name, spec in weights.items()}
        specs = (weights, cache, P(self.axis, self.pooled))
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs, is_leaf=lambda x: isinstance(x, P))

    def step(self, phase: Phase) -> Any:
        """The jitted step; the cache is donated."""
        weights, cache, batch = self.shardings()
        step = partial(self._replica_step, phase=phase)
        mapped = jax.vmap(step, in_axes=(None, 0, 0), spmd_axis_name=self.axis)
        if self.replicas == 1:
            # Grouped products cannot be mapped over.
            def mapped(weights: Weights, cache: Cache, batch: StepBatch) -> tuple[Cache, StepOutput]:
                alone = jax.tree.map(lambda x: x[0], (cache, batch))
                return jax.tree.map(lambda x: x[None], step(weights, *alone))

        return jax.jit(mapped, in_shardings=(weights, cache, batch), out_shardings=(cache, batch), donate_argnums=1)

    def _replica_step(self, weights: Weights, cache: Cache, batch: StepBatch, phase: Phase) -> tuple[Cache, StepOutput]:
        config = self.config
        flat = [(path, variable.replace(weights[name])) for name, (path, variable) in self._variables.items()]
        model: Decoder = nnx.merge(self._graph, nnx.from_flat_state(flat))
        lanes, tokens = batch.positions.shape
        store = HeadsApart(cache.positions, batch.table, batch.start[:, 0], batch.positions)
        cos, sin = angles(batch.positions.reshape(-1), config.rope, config.head_dim)
        attention = bound(local.PREFILL, batch.positions, store.key_positions, self.plan, phase)
        step = Step(config, self.plan, phase, lanes, tokens, store.key_positions.shape[1])
        strategies = chosen(step)
        dispatch = dispatched(strategies["moe_dispatch"], step) if "moe_dispatch" in strategies else None
        reduction = strategies["all_reduce"].run(self.plan)
        context = StepContext(self.plan, phase, batch.positions, cos, sin, store, attention, (), dispatch, reduction)
        x = model.embedding_rows[batch.tokens.reshape(-1)]
        with no_kernels():
            (x,), planes, _ = model([x], cache.planes, [context])
        x = jnp.take_along_axis(model.normed(x).reshape(lanes, tokens, -1), batch.last[:, None, None], axis=1)[:, 0]
        scores = local_logits(x, model.head_rows, config.vocab_size, ())
        token, logprob = sample(scores, config.vocab_size, (), batch.options, sampled=False)
        return Cache(planes, store.positions_plane), StepOutput(token, logprob, None, None, None)
