"""The ledger of one step: traffic, FLOPs and memory of each rank, every figure with where it comes from."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxpar.checkpoint.config import ModelConfig
from jaxpar.errors import PlanError
from jaxpar.ledger.compiled import Change, compare_compiled
from jaxpar.ledger.flops import trace_flops
from jaxpar.ledger.hlo import parse_collectives
from jaxpar.ledger.predict import local_bytes, predict_flops, predict_traffic
from jaxpar.ledger.trace import trace_traffic
from jaxpar.ledger.traffic import Traffic, compare, merge
from jaxpar.mesh import AXES
from jaxpar.plan import PHASES, Phase, Plan
from jaxpar.program import Programs
from jaxpar.strategies import Step


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of the step: bytes of temporaries on a rank, and how it changed the collectives."""

    backend: str
    temporary_bytes: int
    changes: list[Change]


@dataclass(frozen=True)
class Ledger:
    """What one step costs on each rank.

    `traffic` and `flops` are the closed forms, `traced` and `traced_flops` those of the jaxpr, `differences` one line
    for each figure on which they differ (none, if all is well). `weight_bytes` and `cache_bytes` are exact. `compiled`
    is None where nothing was compiled. A prefill of `steps` chunks is shown by its last, largest step.
    """

    step: Step
    batch: int
    seq: int
    steps: int
    traffic: list[Traffic]
    traced: list[Traffic]
    flops: dict[str, int]
    traced_flops: dict[str, int]
    differences: list[str]
    weight_bytes: int
    cache_bytes: int
    compiled: Compiled | None

    @property
    def sent_bytes(self) -> int:
        """Bytes that one rank sends in a step."""
        return sum(row.sent_bytes for row in self.traffic)

    def to_json(self) -> dict[str, Any]:
        """Every figure, in bytes and FLOPs of one rank, as plain data."""
        plan = self.step.plan
        return {
            "mesh": plan.mesh.sizes,
            "dtype": plan.dtype,
            "phase": self.step.phase,
            "batch": self.batch,
            "context": self.seq,
            "lanes": self.step.lanes,
            "tokens": self.step.tokens,
            "keys": self.step.keys,
            "steps": self.steps,
            "sampled": self.step.sampled,
            "traffic": [asdict(row) for row in self.traffic],
            "traced": [asdict(row) for row in self.traced],
            "sent_bytes": self.sent_bytes,
            "flops": self.flops,
            "traced_flops": self.traced_flops,
            "agree": not self.differences,
            "differences": self.differences,
            "weight_bytes": self.weight_bytes,
            "cache_bytes": self.cache_bytes,
            "compiled": self.compiled
            and {
                "backend": self.compiled.backend,
                "temporary_bytes": self.compiled.temporary_bytes,
                "changes": [asdict(change) for change in self.compiled.changes],
            },
        }


def make_step(
    config: ModelConfig, plan: Plan, phase: Phase, batch: int, seq: int, sampled: bool = False
) -> tuple[Step, int]:
    """The step of `batch` requests of `seq` tokens, and how many such steps a phase takes.

    Raises:
        PlanError: an unknown phase, numbers below 1, or more tokens than the model's context.
    """
    if phase not in PHASES:
        raise PlanError(f"phase={phase!r} is unknown: use {' or '.join(PHASES)}")
    for name, value in (("batch", batch), ("context", seq)):
        if value < 1:
            raise PlanError(f"{name}={value}: it must be at least 1")
    if seq > config.max_position_embeddings:
        raise PlanError(f"context={seq} is more than the model's {config.max_position_embeddings} positions")
    lanes = -(-batch // (plan.mesh.dp * plan.mesh.ep))
    keys = -(-seq // plan.page_size) * plan.page_size
    tokens = 1 if phase == "decode" else min(plan.chunk, seq)
    steps = 1 if phase == "decode" else -(-seq // plan.chunk)
    return Step(config, plan, phase, lanes, tokens, keys, sampled=sampled), steps


def make_ledger(
    config: ModelConfig,
    plan: Plan,
    phase: Phase,
    batch: int,
    seq: int,
    mesh: Mesh | AbstractMesh | None = None,
    sampled: bool = False,
) -> Ledger:
    """Count one step.

    Args:
        config: the model; weights are not needed.
        plan: how it runs.
        phase: "prefill" or "decode".
        batch: requests in all, padded to a multiple of the replicas.
        seq: tokens of each request: those that prefill takes, or those cached when a decode step runs.
        mesh: devices to compile for; None or an abstract mesh counts without compiling, which needs no device.
        sampled: whether tokens are drawn by temperature, top-k and top-p, or greedily.

    Raises:
        PlanError: see make_step; or an axis that cannot run yet.
    """
    step, steps = make_step(config, plan, phase, batch, seq, sampled)
    sizes = plan.mesh.sizes
    abstract = AbstractMesh(tuple(sizes[axis] for axis in AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    programs = Programs(config, plan, mesh or abstract)
    pages = step.lanes * step.keys // plan.page_size
    arguments = programs.abstract_arguments(step, pages)
    jaxpr = jax.make_jaxpr(programs.spmd(phase, sampled=sampled))(*arguments)
    traffic, traced = predict_traffic(step), merge(trace_traffic(jaxpr, sizes))
    flops, traced_flops = predict_flops(step), {row.sublayer: row.flops for row in trace_flops(jaxpr)}
    differences = compare(traffic, traced)
    differences += [
        f"{name} FLOPs: predicted {flops.get(name, 0)}, traced {traced_flops.get(name, 0)}"
        for name in dict.fromkeys([*flops, *traced_flops])
        if flops.get(name, 0) != traced_flops.get(name, 0)
    ]
    return Ledger(
        step=step,
        batch=batch,
        seq=seq,
        steps=steps,
        traffic=traffic,
        traced=traced,
        flops=flops,
        traced_flops=traced_flops,
        differences=differences,
        weight_bytes=local_bytes(arguments[0], programs.weight_specs, sizes),
        cache_bytes=local_bytes(arguments[1].planes, programs.cache_specs().planes, sizes),
        compiled=_compile(programs, mesh, step, arguments, traced) if isinstance(mesh, Mesh) else None,
    )


def _compile(programs: Programs, mesh: Mesh, step: Step, arguments: Any, traced: list[Traffic]) -> Compiled:
    compiled = programs.step(step.phase, sampled=step.sampled).lower(*arguments).compile()
    found = parse_collectives(compiled.as_text(), step.plan.mesh.sizes)
    return Compiled(
        backend=mesh.devices.flat[0].platform,
        temporary_bytes=compiled.memory_analysis().temp_size_in_bytes,
        changes=compare_compiled(traced, found),
    )
