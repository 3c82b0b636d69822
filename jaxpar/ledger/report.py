"""The ledger of a phase: traffic, FLOPs and memory of each rank, every figure with where it comes from."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from numpy.typing import ArrayLike

from jaxpar.attention.planes import values_a_token
from jaxpar.checkpoint.config import ModelConfig
from jaxpar.devices import abstract_mesh
from jaxpar.ledger.boundaries import Boundaries, boundaries_of
from jaxpar.ledger.compiled import Change, compare_compiled
from jaxpar.ledger.flops import trace_flops
from jaxpar.ledger.hlo import parse_collectives
from jaxpar.ledger.latents import Latents
from jaxpar.ledger.memory import memory_of
from jaxpar.ledger.predict import predict_flops, predict_traffic
from jaxpar.ledger.rounds import Rounds, all_flops, all_rounds, count_rounds, loads_of
from jaxpar.ledger.steps import make_items, make_steps
from jaxpar.ledger.trace import trace_traffic
from jaxpar.ledger.traffic import Traffic, compare, merge, times
from jaxpar.ledger.work import Work, prefill_work
from jaxpar.pipeline.stages import layers_of_stages
from jaxpar.plan import Phase, Plan
from jaxpar.program import Programs
from jaxpar.registry import reasons
from jaxpar.strategies import Choice, Step


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of a step: bytes of temporaries on a rank, and how it changed the collectives."""

    backend: str
    temporary_bytes: int
    changes: list[Change]


@dataclass(frozen=True)
class StepLedger:
    """What one step costs on each rank, and how often it runs (`count`).

    `traffic` and `flops` are the closed forms, `traced` and `traced_flops` those of the jaxpr, per iteration of loops
    that run until nothing is left; `differences` one line for each figure on which they differ (none, if all is well).
    `rounds` are the iterations of those loops, and `auto` what it chose.
    """

    step: Step
    count: int
    traffic: list[Traffic]
    traced: list[Traffic]
    flops: dict[str, int]
    traced_flops: dict[str, int]
    differences: list[str]
    rounds: Rounds
    auto: dict[str, Choice]

    @property
    def all_traffic(self) -> list[Traffic]:
        """The closed forms with every iteration in them."""
        return [all_rounds(row, self.rounds) for row in self.traffic]

    @property
    def all_flops(self) -> dict[str, int]:
        """The closed forms with every iteration in them."""
        return all_flops(self.flops, self.rounds)


@dataclass(frozen=True)
class Ledger:
    """What one phase costs on each rank: a decode step, or all steps of a prefill.

    Over pp a step of the program is a tick of the pipeline, in which each stage works on a group of requests: a decode
    step is as many ticks as all groups take one after another, a prefill all ticks until the pipeline is empty again.

    `stages` are the layers of each stage, `idle_share` the part of all ticks in which a stage has nothing to do, and
    `boundaries` what all stages send on together, None of a single stage.
    `steps` are those of different sizes, in order. Sizes are those that the engine runs: lanes, tokens, page tables and
    the pool of `pages` pages are rounded up. `cache_bytes` is the pool that a rank holds, `needed_cache_bytes` the part
    that the tokens asked for need, `copied_cache_bytes` what of all ranks' pools other ranks of tp hold, too, or is
    padding of heads. `work` is that of a prefill's attention, `latents` what tp costs and saves a model with latent
    attention. `compiled` is the largest step as the compiler made it, None where nothing was compiled.
    """

    plan: Plan
    phase: Phase
    batch: int
    seq: int
    stages: tuple[int, ...]
    idle_share: float
    boundaries: Boundaries | None
    steps: list[StepLedger]
    pages: int
    weight_bytes: int
    cache_bytes: int
    needed_cache_bytes: int
    copied_cache_bytes: int
    latents: Latents | None
    work: Work | None
    compiled: Compiled | None

    @property
    def traffic(self) -> list[Traffic]:
        """All steps and iterations together, by closed form; `per` names the loops that the iterations are of."""
        return merge(times(row, part.count) for part in self.steps for row in part.all_traffic)

    @property
    def flops(self) -> dict[str, int]:
        """All steps and iterations together, by sublayer and closed form."""
        total: Counter[str] = Counter()
        for part in self.steps:
            total.update({name: part.count * flops for name, flops in part.all_flops.items()})
        return dict(total)

    @property
    def rounds(self) -> Rounds:
        """Iterations of each loop, in every MoE layer of every step."""
        symbols = dict.fromkeys(symbol for part in self.steps for symbol in part.rounds)
        return {symbol: [n for part in self.steps for n in part.rounds.get(symbol, ())] for symbol in symbols}

    @property
    def differences(self) -> list[str]:
        """Where a step's closed forms and its jaxpr differ; none, if all is well."""
        return [line for part in self.steps for line in part.differences]

    @property
    def sent_bytes(self) -> int:
        """Bytes that one rank sends in all steps."""
        return sum(row.sent_bytes for row in self.traffic)

    @property
    def sent_steps(self) -> int:
        """Messages of one rank that wait for one another, in all steps: each costs the latency of a link."""
        return sum(row.steps for row in self.traffic)

    def to_json(self) -> dict[str, Any]:
        """Every figure, in bytes and FLOPs of one rank, as plain data."""
        return {
            "mesh": self.plan.mesh.sizes,
            "dtype": self.plan.dtype,
            "phase": self.phase,
            "batch": self.batch,
            "context": self.seq,
            "stages": self.stages,
            "idle_share": self.idle_share,
            "boundaries": self.boundaries and self.boundaries._asdict(),
            "steps": [_step_json(part) for part in self.steps],
            "traffic": [row.to_json() for row in self.traffic],
            "sent_bytes": self.sent_bytes,
            "sent_steps": self.sent_steps,
            "flops": self.flops,
            "agree": not self.differences,
            "differences": self.differences,
            "weight_bytes": self.weight_bytes,
            "cache_pages": self.pages,
            "cache_bytes": self.cache_bytes,
            "needed_cache_bytes": self.needed_cache_bytes,
            "copied_cache_bytes": self.copied_cache_bytes,
            "latents": self.latents and asdict(self.latents) | {"best_tp": self.latents.best_tp},
            "attention_work": self.work and asdict(self.work),
            "compiled": self.compiled and asdict(self.compiled),
        }


def _step_json(part: StepLedger) -> dict[str, Any]:
    return {
        "count": part.count,
        "lanes": part.step.lanes,
        "tokens": part.step.tokens,
        "keys": part.step.keys,
        "sampled": part.step.sampled,
        "room": part.step.room,
        "traffic": [row.to_json() for row in part.traffic],
        "traced": [row.to_json() for row in part.traced],
        "flops": part.flops,
        "traced_flops": part.traced_flops,
        "rounds": dict(part.rounds),
        "auto": {sublayer: choice._asdict() for sublayer, choice in part.auto.items()},
    }


def make_ledger(
    config: ModelConfig,
    plan: Plan,
    phase: Phase,
    batch: int,
    seq: int,
    mesh: Mesh | AbstractMesh | None = None,
    sampled: bool = False,
    loads: ArrayLike | None = None,
) -> Ledger:
    """Count a decode step or a whole prefill.

    Args:
        config: the model; weights are not needed.
        plan: how it runs.
        phase: "prefill" or "decode".
        batch: requests in all, as many of which run at once, whatever the plan's `max_num_seqs`.
        seq: tokens of each request: those that prefill takes, or those cached when a decode step has stored its own.
        mesh: devices to compile for; None or an abstract mesh counts without compiling, which needs no device.
        sampled: whether tokens are drawn by temperature, top-k and top-p, or greedily.
        loads: of the experts [MoE layers, experts], from which follows how many rounds a dispatch takes; None: even.

    Raises:
        PlanError: see make_steps; an axis that cannot run yet; or loads of another model.
    """
    layers = loads_of(config, loads)
    steps = make_steps(config, plan, phase, batch, seq, sampled)
    items = make_items(plan, phase, batch, seq)
    # On an abstract mesh programs hold what each backend runs, of which accelerators' is counted.
    programs = Programs(config, plan, abstract_mesh(plan.mesh))
    memory = memory_of(programs, phase, batch, seq)
    counted = [_count(programs, step, count, memory.pages, layers) for step, count in Counter(steps).items()]
    largest = max(counted, key=lambda part: part.step.tokens * part.step.keys)
    return Ledger(
        plan=plan,
        phase=phase,
        batch=batch,
        seq=seq,
        stages=layers_of_stages(config, plan),
        idle_share=1 - len(items) / len(steps),
        boundaries=boundaries_of(items, steps) if plan.pipeline else None,
        steps=counted,
        **memory._asdict(),
        latents=_latents(programs, batch * seq * values_a_token(config, Plan())) if config.mla else None,
        work=prefill_work(config, plan, seq, batch) if phase == "prefill" else None,
        compiled=_compile(Programs(config, plan, mesh), largest, memory.pages) if isinstance(mesh, Mesh) else None,
    )


def _latents(programs: Programs, values: int) -> Latents:
    """For `values` of a cache in each layer."""
    config, dtype = programs.config, jnp.dtype(programs.plan.dtype)
    weights = sum(weight.abstract.size for name, weight in programs.weights.items() if ".attention." in name)
    cache = values * config.num_hidden_layers
    return Latents(weights * dtype.itemsize, cache * dtype.itemsize, programs.plan.mesh.size)


def _count(programs: Programs, step: Step, count: int, pages: int, loads: np.ndarray | None) -> StepLedger:
    program = programs.spmd(step.phase, sampled=step.sampled, room=step.room)
    jaxpr = jax.make_jaxpr(program)(*programs.abstract_arguments(step, pages))
    traffic, traced = predict_traffic(step), merge(trace_traffic(jaxpr, step.plan.mesh.sizes))
    flops, traced_flops = predict_flops(step), {row.name: row.flops for row in trace_flops(jaxpr)}
    differences = compare(traffic, traced)
    differences += [
        f"{name} FLOPs: predicted {flops.get(name, 0)}, traced {traced_flops.get(name, 0)}"
        for name in dict.fromkeys([*flops, *traced_flops])
        if flops.get(name, 0) != traced_flops.get(name, 0)
    ]
    rounds, auto = count_rounds(step, loads), reasons(step.batches[0])
    return StepLedger(step, count, traffic, traced, flops, traced_flops, differences, rounds, auto)


def _compile(programs: Programs, part: StepLedger, pages: int) -> Compiled:
    step = part.step
    arguments = programs.abstract_arguments(step, pages)
    compiled = programs.step(step.phase, sampled=step.sampled, room=step.room).lower(*arguments).compile()
    found = parse_collectives(compiled.as_text(), step.plan.mesh.sizes)
    return Compiled(
        backend=programs.mesh.devices.flat[0].platform,
        temporary_bytes=compiled.memory_analysis().temp_size_in_bytes,
        changes=compare_compiled(part.traced, found),
    )
