"""The answers to more ranks of tp than KV heads as a table for people."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from jaxpar.ledger.compare import Answer, Cost
from jaxpar.plan import Phase
from jaxpar.presets import Preset
from jaxpar.tables import counted, human_bytes, table

_COLUMNS = ("", "mesh", "weights", "KV cache", "of it copies", "sent", "calls", "steps", "FLOPs")


def render_answers(
    answers: Sequence[Answer], kv_heads: int, phase: Phase, batch: int, seq: int, preset: Preset | None = None
) -> Group:
    """What one rank holds, sends and computes under each answer; below, why one cannot run."""
    mesh, dtype = answers[0].plan.mesh, answers[0].plan.dtype
    what = f"{counted(batch, 'request')} of {counted(seq, 'token')}"
    headline = (
        f"{phase} on {counted(mesh.size, 'device')}, {dtype}: {what}; tp={mesh.tp} exceeds "
        f"{counted(kv_heads, 'KV head')}; what one rank holds, sends and computes"
    )
    parts: list[RenderableType] = [
        Text(headline),
        "",
        table("", _COLUMNS, [_row(answer) for answer in answers], left=2),
    ]
    refused = [Text(f"{answer.name}: {answer.refused}") for answer in answers if answer.refused]
    if preset is not None:
        parts += ["", Text(f"{preset.device.kind} has {human_bytes(preset.device.memory_bytes)}.")]
    return Group(*parts, "", *refused, Text(_least(answers)))


def _row(answer: Answer) -> tuple[object, ...]:
    mesh, cost = str(answer.plan.mesh), answer.cost
    if cost is None:
        return (answer.name, mesh, "cannot run", *[""] * (len(_COLUMNS) - 3))
    memory = cost.memory
    return (
        answer.name,
        mesh,
        human_bytes(memory.weight_bytes),
        human_bytes(memory.cache_bytes),
        human_bytes(memory.copied_cache_bytes / answer.plan.mesh.size),
        human_bytes(cost.sent_bytes),
        cost.calls,
        cost.steps,
        f"{cost.flops:.4g}",
    )


def _least(answers: Sequence[Answer]) -> str:
    """Which answer is least in what."""
    figures: dict[str, Callable[[Cost], int]] = {
        "memory": lambda cost: cost.memory.weight_bytes + cost.memory.cache_bytes,
        "sent": lambda cost: cost.sent_bytes,
        "steps": lambda cost: cost.steps,
    }
    said = []
    for name, figure in figures.items():
        costs = {answer.name: figure(answer.cost) for answer in answers if answer.cost is not None}
        best = [answer for answer, cost in costs.items() if cost == min(costs.values())]
        said.append(f"{name}: {', '.join(best)}")
    return f"Least {'; '.join(said)}."
