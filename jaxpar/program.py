"""The step programs: the only `shard_map` that runs the model. Prefill and decode are one function of the plan's phase.

Below it everything is a plain function of local arrays and axis names.

    weights, cache (donated), batch  ->  shard_map  ->  cache, token and log-probability of each lane [, logits]

Over pp a step is one tick of a pipeline: each stage runs its layers on a batch of its own, rows that the stage before
has passed on (`pipeline/send_recv.py`), and passes them on. Every stage runs the whole program: where it has no batch
on rows of padding, for a collective under a condition that differs between ranks hangs.

Under `two_batch_overlap` the first and the second half of a replica's lanes are two batches in one program
(`nn/decoder.py`), which share the cache: the second sees the pages that the first has written, and not the other way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.attention.bind import bound
from jaxpar.attention.cache import Cache, Plane, cache_shapes, cache_specs
from jaxpar.attention.planes import planes_of
from jaxpar.attention.store import PagedStore
from jaxpar.batch import StepBatch, StepOutput, batch_shapes
from jaxpar.checkpoint.config import ModelConfig
from jaxpar.collectives import rank_index
from jaxpar.errors import PlanError
from jaxpar.layout import owner
from jaxpar.moe.bind import bound as dispatched
from jaxpar.moe.record import LayerRecord, all_dropped, all_loads
from jaxpar.nn.context import StepContext
from jaxpar.nn.decoder import Decoder
from jaxpar.nn.expert_map import Table
from jaxpar.nn.rope import angles
from jaxpar.nn.weights import Weight
from jaxpar.overlap import in_halves, joined
from jaxpar.pipeline.ends import entering, on_last_stage
from jaxpar.pipeline.flow import Flow
from jaxpar.pipeline.present import by_layer
from jaxpar.pipeline.stages import moe_layer_of
from jaxpar.plan import Phase, Plan
from jaxpar.registry import chosen, running
from jaxpar.strategies import Step, Strategy
from jaxpar.vocabulary.head import all_tokens, last_tokens
from jaxpar.vocabulary.sampling import SamplingArrays

Weights = dict[str, jax.Array]


StepFunction = Callable[[Weights, Cache, StepBatch], tuple[Cache, StepOutput]]


class Programs:
    """A model's step programs under a plan, and the shapes and shardings of what they take."""

    def __init__(self, config: ModelConfig, plan: Plan, mesh: Mesh | AbstractMesh) -> None:
        """Declare the model; nothing is compiled before the first step.

        Raises:
            PlanError: an axis that cannot run yet, a strategy that does not exist or that refuses the model.
        """
        if plan.expert_slots and not config.has_experts:
            raise PlanError(f"expert_slots={plan.expert_slots}: this {config.model_type} has no experts; leave it out")
        running(config, plan)
        self.config, self.plan, self.mesh = config, plan, mesh
        self.model = Decoder(config, plan)
        self._graph, state = nnx.split(self.model)
        self._paths = {".".join(map(str, path)): path for path, _ in nnx.to_flat_state(state)}
        self.arrays: dict[str, Weight | Table] = dict(
            zip(self._paths, (variable for _, variable in nnx.to_flat_state(state)), strict=True)
        )
        """What a step takes as its weights: those, and the maps of where experts lie."""
        self.weights = {name: array for name, array in self.arrays.items() if isinstance(array, Weight)}
        """Those arrays that a checkpoint has."""
        self.planes = [planes_of(config, plan)] * len(self.model.slots)
        self.flow = Flow(plan, mesh)
        self.dropped = 0
        """Rows that the experts' `moe_capacity` had no room for, in all steps so far."""
        self.watchers: list[Callable[[StepOutput], None]] = []
        """Called in turn after every step, with its output."""
        # One jitted function for each kind of step; it compiles once for each shape that it meets.
        self.step = lru_cache(maxsize=None)(self._compiled_on_use)

    @cached_property
    def weight_specs(self) -> dict[str, P]:
        """PartitionSpec of every weight."""
        return {name: weight.spec for name, weight in self.weights.items()}

    @cached_property
    def array_specs(self) -> dict[str, P]:
        """PartitionSpec of every array that a step takes as its weights."""
        return {name: array.spec for name, array in self.arrays.items()}

    def sharded(self, specs: Any) -> Any:
        """PartitionSpecs -> NamedShardings on this mesh."""
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs, is_leaf=lambda x: isinstance(x, P))

    def bind(self, weights: Weights) -> Decoder:
        """The model with `weights` in it: whole arrays outside the shard_map, local ones inside."""
        state = nnx.from_flat_state(
            [(path, self.arrays[name].replace(weights[name])) for name, path in self._paths.items()]
        )
        model: Decoder = nnx.merge(self._graph, state)
        return model

    def batch_specs(self, phase: Phase) -> StepBatch:
        """PartitionSpecs of a batch: lanes over (pp, dp, ep), a prompt's tokens over cp in prefill."""
        lanes = P(self.plan.lanes or None)
        over_cp = P(self.plan.lanes or None, self.plan.sequence or None)
        whole = P(self.plan.lanes or None, None)
        tokens = over_cp if phase == "prefill" else whole
        return StepBatch(tokens, tokens, over_cp, whole, lanes, SamplingArrays(*[lanes] * 5))

    def cache_specs(self, phase: Phase) -> Cache:
        """PartitionSpecs of the cache, and of what goes from stage to stage in `phase`."""
        flow = self.flow.spec(phase) if self.plan.pipeline else None
        return cache_specs(self.planes, self.plan)._replace(flow=flow)

    def empty_cache(self, pages: int) -> Cache:
        """A cache with no key in it and `pages` pages on every rank, each rank making its own part."""
        cache: Cache = self._new_cache(pages)
        return cache

    @cached_property
    def _new_cache(self) -> Any:
        make = partial(_no_keys, self.planes, self.plan)
        return jax.jit(make, static_argnums=0, out_shardings=self.sharded(cache_specs(self.planes, self.plan)))

    def abstract_arguments(self, step: Step, pages: int) -> tuple[dict[str, Any], Cache, StepBatch]:
        """ShapeDtypeStructs of a step's arguments, for tracing and compiling without any array."""
        weights = {name: array.abstract for name, array in self.arrays.items()}
        cache = cache_shapes(self.planes, pages, self.plan)
        if self.plan.pipeline:
            cache = cache._replace(flow=self.flow.shape(step))
        return weights, cache, batch_shapes(step)

    def spmd(self, phase: Phase, logits: bool = False, sampled: bool = False, room: int = 0) -> StepFunction:
        """The step as one SPMD program, not yet compiled.

        Args:
            phase: prefill or decode.
            logits: whether logits of every token come out instead of the next token.
            sampled: whether any lane draws its token; a greedy program holds no noise.
            room: that of Step.
        """
        specs = (self.array_specs, self.cache_specs(phase), self.batch_specs(phase))

        def local(weights: Weights, cache: Cache, batch: StepBatch) -> tuple[Cache, StepOutput]:
            return self._local_step(weights, cache, batch, phase, logits, sampled, room)

        return jax.shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=self._out_specs(phase, logits))

    def _compiled_on_use(self, phase: Phase, logits: bool = False, sampled: bool = False, room: int = 0) -> Any:
        program = self.spmd(phase, logits, sampled, room)
        specs = (self.array_specs, self.cache_specs(phase), self.batch_specs(phase))
        return jax.jit(
            program,
            in_shardings=self.sharded(specs),
            out_shardings=self.sharded(self._out_specs(phase, logits)),
            donate_argnums=1,
            compiler_options=compiler_options(self.mesh.devices.flat[0].platform, self.plan),
        )

    def note(self, output: StepOutput) -> None:
        """Add up what a step that ran has counted, and pass it on to those who watch."""
        if output.dropped is not None:
            self.dropped += int(np.asarray(output.dropped).sum())
        for watcher in self.watchers:
            watcher(output)

    @property
    def _drops(self) -> bool:
        return self.config.has_experts and bool(self.plan.experts) and self.plan.moe_capacity > 0

    def _out_specs(self, phase: Phase, logits: bool) -> tuple[Cache, StepOutput]:
        lanes = P(self.plan.lanes or None)
        # Ranks count for themselves, and the host adds up.
        ranks = P(self.plan.routed(phase) or None)
        loads, dropped = ranks if self.config.has_experts else None, ranks if self._drops else None
        if logits:
            tokens = self.batch_specs(phase).tokens
            all_logits = P(*tokens, self.plan.width or None)
            return self.cache_specs(phase), StepOutput(None, None, all_logits, loads, dropped)
        return self.cache_specs(phase), StepOutput(lanes, lanes, None, loads, dropped)

    def _local_step(
        self, weights: Weights, cache: Cache, batch: StepBatch, phase: Phase, logits: bool, sampled: bool, room: int
    ) -> tuple[Cache, StepOutput]:
        """One step in the local view: shapes as StepBatch, B the lanes of this replica."""
        lanes, tokens = batch.positions.shape
        keys = batch.table.shape[1] * self.plan.page_size
        steps = Step(self.config, self.plan, phase, lanes, tokens, keys, logits, sampled, room).batches
        batches = [batch] if len(steps) == 1 else in_halves(batch)
        step, model = steps[0], self.bind(weights)
        strategies = chosen(step)
        positions, contexts = cache.positions, []
        for one in batches:
            store = self._store(one, positions, phase)
            positions = store.positions_plane
            contexts.append(self._context(one, store, step, strategies))
        sublayer, embed = self.plan.sublayer("vocabulary", phase), strategies["embedding"].run
        rows = [embed(one.tokens.reshape(-1), model.embedding_rows, sublayer) for one in batches]
        if self.plan.pipeline:
            rows = [entering(cache.flow, rows[0], self.plan)]
        rows, planes, records = model(rows, cache.planes, contexts)
        flow = strategies["pipeline"].run(rows[0], self.plan) if self.plan.pipeline else None
        outputs = [self._next(model, x, one, step, strategies) for x, one in zip(rows, batches, strict=True)]
        loads, dropped = (
            None if counts is None else counts[None] for counts in (self._loads(records), all_dropped(records))
        )
        return Cache(planes, positions, flow), joined(outputs)._replace(loads=loads, dropped=dropped)

    def _loads(self, records: list[LayerRecord]) -> jax.Array | None:
        """Loads of all MoE layers [L, E]; of those that other stages run, 0."""
        loads = all_loads(records)
        if loads is None or not self.plan.pipeline:
            return loads
        return by_layer(loads, moe_layer_of(self.config, self.plan), self.plan)

    def _store(self, batch: StepBatch, positions_plane: jax.Array, phase: Phase) -> PagedStore:
        """Where the keys of a batch go; `positions_plane` [pages, page_size] is the cache's before it."""
        plan, stored = self.plan, batch.positions
        if phase == "decode" and plan.sequence:
            # Every rank of cp has the new tokens, and the one that the position names stores them.
            mine = owner(stored, plan.mesh.cp, plan.cp_interleave) == rank_index(plan.sequence)
            stored = jnp.where(mine, stored, -1)
        return PagedStore(positions_plane, batch.table, batch.start[:, 0], stored, in_order=plan.mesh.cp == 1)

    def _context(
        self, batch: StepBatch, store: PagedStore, step: Step, strategies: Mapping[str, Strategy]
    ) -> StepContext:
        """What the layers share of one batch."""
        plan, config, phase = self.plan, self.config, step.phase
        parts, fixed = step.heads.parts, plan.fixed_order
        rank = rank_index(plan.width) if parts > 1 else 0
        cos, sin = angles(batch.positions.reshape(-1), config.rope, config.rope_head_dim, rank, parts, fixed)
        chosen_attention = strategies[f"{phase}_attention"]
        attention = bound(chosen_attention, batch.positions, store.key_positions, plan, phase)
        query_axes = plan.active(chosen_attention.query_axes)
        dispatch = dispatched(strategies["moe_dispatch"], step) if "moe_dispatch" in strategies else None
        reduction = strategies["all_reduce"].run(plan)
        return StepContext(plan, phase, batch.positions, cos, sin, store, attention, query_axes, dispatch, reduction)

    def _next(
        self, model: Decoder, x: jax.Array, batch: StepBatch, step: Step, strategies: Mapping[str, Strategy]
    ) -> StepOutput:
        """One batch's residual rows after all layers -> its next tokens, or the logits of all its tokens."""
        plan, vocab_size = self.plan, self.config.vocab_size
        sublayer = plan.sublayer("vocabulary", step.phase)
        x = model.normed(x)
        if step.logits:
            x = all_tokens(x, step.rows, sublayer)
        else:
            x = last_tokens(x, batch.last, step.tokens, sublayer, plan.slices(step.phase))
        table = model.head_rows
        head = strategies["head"].run
        scores = on_last_stage(lambda x: head(x, table, vocab_size, plan.width, plan.fixed_order), x, plan)
        if step.logits:
            return StepOutput(None, None, scores.reshape(step.lanes, step.tokens, -1), None, None)
        token, logprob = strategies["sampling"].run(
            scores, vocab_size, plan.width, batch.options, step.sampled, plan.fixed_order
        )
        return StepOutput(token, logprob, None, None, None)


def compiler_options(platform: str, plan: Plan) -> dict[str, str] | None:
    """What XLA is told on a platform; None: nothing.

    XLA:GPU keeps one collective under way at a time. A ring that sends both ways has two, of which the first would then
    end before the product begins.

    XLA:TPU gives one operation 16 MiB of a core's memory (VMEM). With more, products read weights in larger pieces, and
    take them straight from HBM, where it would copy those of small projections to VMEM first (docs/accelerators.md).
    Calls that layers have in common are one piece of code: an exchange among hundreds of ranks is megabytes of it.
    """
    if platform == "tpu":
        return {"xla_tpu_scoped_vmem_limit_kib": str(64 << 10), "xla_tpu_enable_deduplicated_calls": "true"}
    if plan.collective_matmul and platform in ("gpu", "cuda", "rocm"):
        return {"xla_gpu_experimental_parallel_collective_overlap_limit": "2"}
    return None


def _no_keys(planes: list[list[Plane]], plan: Plan, pages: int) -> Cache:
    def empty(shape: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.full(shape.shape, -1 if jnp.issubdtype(shape.dtype, jnp.integer) else 0, shape.dtype)

    return jax.tree.map(empty, cache_shapes(planes, pages, plan))
