"""A pipeline by hand: one batch goes from stage to stage, and what the stages leave is held against other programs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import ClosedJaxpr
from jax.sharding import PartitionSpec as P

from jaxpar.attention.bind import bound
from jaxpar.attention.cache import PagedStore
from jaxpar.attention.planes import planes_of
from jaxpar.checkpoint import open_checkpoint
from jaxpar.checkpoint.load import load_weights
from jaxpar.collectives import rank_index, shift
from jaxpar.devices import ensure_devices, make_mesh
from jaxpar.mesh import MeshSpec
from jaxpar.moe.bind import bound as dispatched
from jaxpar.moe.record import LayerRecord
from jaxpar.nn.context import StepContext
from jaxpar.nn.decoder import Decoder
from jaxpar.nn.linear import matmul, rms_norm
from jaxpar.nn.rope import angles
from jaxpar.nn.weights import Weight
from jaxpar.plan import Plan
from jaxpar.registry import chosen
from jaxpar.strategies import Step


class StageProgram:
    """A model's layers on a mesh of stages (and of requests), for one prefill of whole prompts.

    In tick t stage t works on the prompts, and every other stage on rows of position -1, as in a pipeline with one
    batch; then all hand their rows on.
    """

    def __init__(self, directory: Path, mesh: str, lanes: int, tokens: int, **plan: Any) -> None:
        checkpoint = open_checkpoint(directory)
        self.config, self.plan = checkpoint.config, Plan(MeshSpec.parse(mesh), **plan)
        self.mesh = make_mesh(self.plan.mesh, ensure_devices(self.plan.mesh))
        self._graph, state = nnx.split(Decoder(self.config, self.plan))
        self._variables = nnx.to_flat_state(state)
        self.weights: dict[str, Weight] = {".".join(map(str, path)): weight for path, weight in self._variables}
        self.arrays = load_weights(self.weights, checkpoint.require_reader(), self.mesh)
        self.lanes = lanes // self.plan.mesh.extent(self.plan.requests)
        self.shape = (lanes, tokens)

    @property
    def step(self) -> Step:
        """What one tick computes."""
        return Step(self.config, self.plan, "prefill", self.lanes, self.shape[1], self._pages * self.plan.page_size)

    @property
    def _pages(self) -> int:
        return -(-self.shape[1] // self.plan.page_size)

    @cached_property
    def jaxpr(self) -> ClosedJaxpr:
        """Of the whole program."""
        batch = jax.ShapeDtypeStruct(self.shape, jnp.int32)
        return jax.make_jaxpr(self._program)({n: w.abstract for n, w in self.weights.items()}, batch, batch)

    def run(self, prompts: Sequence[Sequence[int]]) -> tuple[list[np.ndarray], np.ndarray | None]:
        """Logits of each prompt's tokens by the last stage, and loads [ranks, MoE slots, E], stages outermost."""
        tokens, positions = np.zeros(self.shape, np.int32), np.full(self.shape, -1, np.int32)
        for lane, prompt in enumerate(prompts):
            tokens[lane, : len(prompt)], positions[lane, : len(prompt)] = prompt, range(len(prompt))
        logits, loads = jax.jit(self._program)(self.arrays, tokens, positions)
        of_last = np.asarray(logits)[-1]
        return [of_last[lane, : len(prompt)] for lane, prompt in enumerate(prompts)], loads and np.asarray(loads[0])

    @property
    def _program(self) -> Any:
        stage, lanes = self.plan.pipeline or None, self.plan.requests or None
        specs = {name: weight.spec for name, weight in self.weights.items()}
        ranks = P(self.plan.routed("prefill") or None)
        return jax.shard_map(
            self._local,
            mesh=self.mesh,
            in_specs=(specs, P(lanes), P(lanes)),
            out_specs=(P(stage, lanes), [ranks] if self.step.moe_layers else []),
        )

    def _local(
        self, weights: dict[str, jax.Array], tokens: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, list[jax.Array]]:
        plan, strategies = self.plan, chosen(self.step)
        pairs = zip(self._variables, weights.values(), strict=True)
        model = nnx.merge(
            self._graph, nnx.from_flat_state([(path, weight.replace(value)) for (path, weight), value in pairs])
        )
        embed, sublayer = strategies["embedding"].run, plan.sublayer("vocabulary", "prefill")
        x = embed(tokens.reshape(-1), model.embedding_rows, sublayer)
        loads: list[jax.Array] = []
        for tick in range(plan.mesh.pp):
            mine = rank_index(plan.pipeline) == tick
            x, records = self._tick(model, x, jnp.where(mine, positions, -1), strategies)
            of_tick = [record.loads for record in records]
            loads = [a + b for a, b in zip(loads, of_tick, strict=True)] if loads else of_tick
            x = shift(x, plan.pipeline) if tick < plan.mesh.pp - 1 else x
        logits = matmul(rms_norm(x, model.norm[...], model.eps), model.head_rows)
        together = [jnp.stack(loads)[None]] if loads else []
        return logits.reshape(1, self.lanes, self.shape[1], -1), together

    def _tick(
        self, model: Decoder, x: jax.Array, positions: jax.Array, strategies: Any
    ) -> tuple[jax.Array, list[LayerRecord]]:
        """Rows [R, D] through the rank's slots, from an empty cache."""
        plan, config, pages = self.plan, self.config, self.lanes * self._pages
        table = jnp.arange(pages, dtype=jnp.int32).reshape(self.lanes, -1)
        empty = jnp.full((pages, plan.page_size), -1, jnp.int32)
        store = PagedStore(empty, table, jnp.zeros(self.lanes, jnp.int32), positions)
        cos, sin = angles(positions.reshape(-1), config.rope, config.rope_head_dim)
        attention = bound(strategies["prefill_attention"], positions, store.key_positions, plan, "prefill")
        dispatch = dispatched(strategies["moe_dispatch"], self.step) if "moe_dispatch" in strategies else None
        reduction = strategies["all_reduce"].run(plan)
        context = StepContext(plan, "prefill", positions, cos, sin, store, attention, (), dispatch, reduction)
        records = []
        for slot in model.slots:
            planes = {
                plane.name: jnp.full((1, plane.heads, pages, plan.page_size, plane.size), jnp.nan)
                for plane in planes_of(config, plan)
            }
            x, _ = slot.attend(x, planes, context)
            x, record = slot.feed(x, context)
            records += [] if record is None else [record]
        return x, records
