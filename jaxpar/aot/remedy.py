"""What to change in a plan that does not fit a device: of its largest item, with the numbers that follow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from jaxpar.aot.compile import CompiledStep
from jaxpar.checkpoint.config import ModelConfig
from jaxpar.devices import abstract_mesh
from jaxpar.errors import JaxparError
from jaxpar.ledger.memory import memory_of
from jaxpar.mesh import AXES
from jaxpar.plan import Plan
from jaxpar.program import Programs
from jaxpar.tables import counted, human_bytes


def remedy(found: CompiledStep, config: ModelConfig) -> str:
    """A sentence for a step that does not fit: its largest item, and the least change that makes room."""
    memory = found.memory
    said = (
        f"{found.target.kind.kind} has {human_bytes(memory.capacity)}, and the step takes {human_bytes(memory.total)}"
    )
    if memory.largest == "weights":
        return f"{said}, most of it weights, {human_bytes(memory.weights)}: {_for_weights(found, config)}"
    if memory.largest == "cache":
        return f"{said}, most of it KV cache, {human_bytes(memory.cache)}: {_for_cache(found, config)}"
    left = memory.total - memory.weights - memory.cache
    return f"{said}, most of it temporaries, {human_bytes(left)}: {_for_temporaries(found, left)}"


def _for_weights(found: CompiledStep, config: ModelConfig) -> str:
    others = found.memory.total - found.memory.weights - found.memory.cache
    best: tuple[int, str] | None = None
    for words, plan in _wider(found.plan, config):
        try:
            held = _held(found, Programs(config, plan, abstract_mesh(plan.mesh)), found.batch) + others
        except JaxparError:
            continue
        text = f"{words} takes {human_bytes(held)} a device"
        if plan.mesh.size > found.target.size:
            text += f", on {counted(plan.mesh.size, 'device')}, and the target has {found.target.size}"
        if held <= found.memory.capacity:
            return text
        if best is None or held < best[0]:
            best = held, f"{text}, which is still too much"
    return best[1] if best else "no wider mesh can run the model; choose a device with more memory"


def _wider(plan: Plan, config: ModelConfig) -> Iterator[tuple[str, Plan]]:
    """Plans that spread weights further, those with the fewest devices first."""
    everywhere = plan.active(axis for axis in AXES if axis != "pp")
    if config.has_experts and everywhere and set(plan.active(plan.experts_over)) != set(everywhere):
        yield f"--experts-over {','.join(everywhere)}", replace(plan, experts_over=everywhere)
    factors = (2, 4, 8, 16, 32, 64)
    for factor in factors:
        if plan.mesh.dp % factor == 0:
            mesh = replace(plan.mesh, dp=plan.mesh.dp // factor, tp=plan.mesh.tp * factor)
            yield f"--mesh {mesh}", replace(plan, mesh=mesh)
    for factor in factors:
        for axis in ("tp", "ep", "pp") if config.has_experts else ("tp", "pp"):
            mesh = replace(plan.mesh, **{axis: plan.mesh.sizes[axis] * factor})
            yield f"--mesh {mesh}", replace(plan, mesh=mesh)


def _for_cache(found: CompiledStep, config: ModelConfig) -> str:
    memory = found.memory
    others = memory.total - memory.weights - memory.cache
    programs = Programs(config, found.plan, abstract_mesh(found.plan.mesh))
    low, high = 0, found.batch
    while high - low > 1:
        middle = (low + high) // 2
        fits = _held(found, programs, middle) + others <= memory.capacity
        low, high = (middle, high) if fits else (low, middle)
    if low:
        return f"--batch {low} fits; more requests need a larger dp or cp"
    return "not even one request fits: a larger cp splits its cache, a shorter --context needs less"


def _for_temporaries(found: CompiledStep, left: int) -> str:
    room = found.memory.capacity - found.memory.weights - found.memory.cache
    chunk = found.step.tokens * found.plan.mesh.cp
    option, value = ("--chunk", chunk) if found.phase == "prefill" else ("--batch", found.batch)
    # They grow no faster than the tokens of a step.
    smaller = max(1, int(value * room / left))
    smaller = 1 << (smaller.bit_length() - 1)
    return (
        f"they grow with {option}, {value} here; {option} {smaller} takes about {human_bytes(left * smaller / value)}"
    )


def _held(found: CompiledStep, programs: Programs, batch: int) -> int:
    """Bytes of weights and cache that a device holds under another plan, or with another batch."""
    held = memory_of(programs, found.phase, batch, found.context)
    return held.weight_bytes + held.cache_bytes
