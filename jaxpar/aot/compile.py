"""A step program compiled for accelerators that need not be there, and what their compiler says of it."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax

from jaxpar.aot.memory import DeviceMemory, needed_of
from jaxpar.aot.sent import Sent, sent_by
from jaxpar.aot.targets import Target, require_compiler
from jaxpar.checkpoint.config import ModelConfig
from jaxpar.ledger.compiled import Change, compare_compiled
from jaxpar.ledger.hlo import collectives_of
from jaxpar.ledger.hlo_flops import compiled_flops
from jaxpar.ledger.hlo_text import argument_bytes, parse_module
from jaxpar.ledger.memory import memory_of
from jaxpar.ledger.predict import local_bytes, predict_flops, predict_traffic
from jaxpar.ledger.steps import make_steps
from jaxpar.plan import Phase, Plan
from jaxpar.program import Programs
from jaxpar.registry import running
from jaxpar.strategies import Step

TOLERANCE = 0.02
"""By which compiled and predicted FLOPs may differ: compilers leave out rows that nobody reads."""


@dataclass(frozen=True)
class CompiledStep:
    """The largest step of a phase as the target's compiler made it; every figure is of one device.

    `steps` are all steps of the phase, with how often each runs; `step` is the one that was compiled. `flops` are the
    compiled program's matrix products by sublayer, `predicted_flops` the ledger's closed forms: loops are multiplied
    out, and those whose trips are known only when they run are counted per iteration. `sent` are its collectives,
    `changes` what the compiler added, merged, removed or resized against what the plan asks for. Nothing was compiled,
    and these are empty, where weights and cache alone do not fit. `optimal_seconds` is XLA's own estimate on TPUs,
    which counts a loop's body once and knows no network; None on GPUs.
    """

    target: Target
    plan: Plan
    phase: Phase
    batch: int
    context: int
    steps: list[tuple[int, Step]]
    step: Step
    memory: DeviceMemory
    predicted_flops: dict[str, int]
    flops: dict[str, int]
    sent: list[Sent]
    changes: list[Change]
    optimal_seconds: float | None
    compile_seconds: float

    @property
    def fits(self) -> bool:
        """Whether a device holds it."""
        return self.memory.fits

    @property
    def compiled(self) -> bool:
        """Whether there is a program."""
        return bool(self.flops)

    @property
    def flops_ratio(self) -> float | None:
        """Compiled FLOPs over predicted ones; None where there is nothing to compare."""
        predicted = sum(self.predicted_flops.values())
        return sum(self.flops.values()) / predicted if self.compiled and predicted else None

    @property
    def agrees(self) -> bool:
        """Whether the compiled FLOPs are the ledger's, within 2 %; so it is where there is nothing to compare."""
        return self.flops_ratio is None or abs(self.flops_ratio - 1) <= TOLERANCE

    def to_json(self) -> dict[str, Any]:
        """Every figure, in bytes, FLOPs and seconds of one device, as plain data."""
        return {
            "target": str(self.target),
            "device": self.target.kind.kind,
            "mesh": self.plan.mesh.sizes,
            "dtype": self.plan.dtype,
            "phase": self.phase,
            "batch": self.batch,
            "context": self.context,
            "steps": [{"count": count, **_sizes(step)} for count, step in self.steps],
            "compiled_step": _sizes(self.step),
            "compiled": self.compiled,
            "fits": self.fits,
            "memory": self.memory.to_json(),
            "flops": self.flops,
            "predicted_flops": self.predicted_flops,
            "flops_ratio": self.flops_ratio,
            "agrees": self.agrees,
            "sent": [row.to_json() for row in self.sent],
            "changes": [asdict(change) for change in self.changes],
            "optimal_seconds": self.optimal_seconds,
            "compile_seconds": self.compile_seconds,
        }


def compile_step(
    config: ModelConfig,
    plan: Plan,
    target: Target,
    phase: Phase,
    batch: int,
    context: int,
    sampled: bool = False,
) -> CompiledStep:
    """Compile the largest step of a phase for a target, with abstract weights.

    Args:
        config: the model; weights are not needed.
        plan: how it runs.
        target: what it would run on.
        phase: "prefill" or "decode".
        batch: requests in all, which run at once.
        context: tokens of each: those that prefill takes, or those cached when a decode step has stored its own.
        sampled: whether tokens are drawn by temperature, top-k and top-p, or greedily.

    Raises:
        PlanError: see `make_steps`, or a strategy that refuses the shapes.
        MeshError: the mesh is larger than the target, or its compiler is not installed.
    """
    target.check(plan.mesh)
    steps = Counter(make_steps(config, plan, phase, batch, context, sampled))
    step = max(steps, key=lambda step: step.tokens * step.keys)
    # What cannot run is refused before a compiler is loaded.
    running(config, plan)
    flops = predict_flops(step)
    require_compiler(target)
    programs = Programs(config, plan, target.mesh(plan.mesh))
    pages, memory = device_memory(programs, target, step, batch, context)
    sizes = [(count, one) for one, count in steps.items()]
    found = CompiledStep(target, plan, phase, batch, context, sizes, step, memory, flops, {}, [], [], None, 0.0)
    return _compiled(found, programs, pages) if memory.fits else found


def device_memory(programs: Programs, target: Target, step: Step, batch: int, context: int) -> tuple[int, DeviceMemory]:
    """Pages of the pool, and what of a device's memory follows from shapes alone."""
    held = memory_of(programs, step.phase, batch, context)
    specs = (programs.array_specs, programs.cache_specs(step.phase), programs.batch_specs(step.phase))
    arguments = local_bytes(programs.abstract_arguments(step, held.pages), specs, programs.plan.mesh.sizes)
    inputs = arguments - held.weight_bytes - held.cache_bytes
    return held.pages, DeviceMemory(target.kind.memory_bytes, held.weight_bytes, held.cache_bytes, inputs)


def _compiled(found: CompiledStep, programs: Programs, pages: int) -> CompiledStep:
    step, begin = found.step, time.monotonic()
    program = programs.step(step.phase, sampled=step.sampled, room=step.room)
    lowered = program.lower(*programs.abstract_arguments(step, pages))
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        needed = needed_of(str(error))
        if needed is None:
            raise
        memory = replace(found.memory, temporaries=needed - found.memory.total)
        return replace(found, memory=memory, compile_seconds=time.monotonic() - begin)
    module = parse_module(compiled.as_text())
    collectives = collectives_of(module, found.plan.mesh.sizes)
    cost = compiled.cost_analysis() or {}
    return replace(
        found,
        memory=_with_compiled(found.memory, compiled.memory_analysis(), argument_bytes(module)),
        flops=compiled_flops(module),
        sent=sent_by(collectives, found.plan, found.target.kind),
        changes=compare_compiled(predict_traffic(step), collectives),
        optimal_seconds=cost.get("optimal_seconds") if found.target.platform == "tpu" else None,
        compile_seconds=time.monotonic() - begin,
    )


def _with_compiled(memory: DeviceMemory, stats: Any, arguments: int) -> DeviceMemory:
    return replace(
        memory,
        inputs=arguments - memory.weights - memory.cache,
        padding=stats.argument_size_in_bytes - arguments,
        temporaries=stats.temp_size_in_bytes,
        outputs=stats.output_size_in_bytes - stats.alias_size_in_bytes,
        code=stats.generated_code_size_in_bytes,
    )


def _sizes(step: Step) -> dict[str, Any]:
    return {name: getattr(step, name) for name in ("lanes", "tokens", "keys", "sampled", "room")}
