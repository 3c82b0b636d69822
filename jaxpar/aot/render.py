"""A compiled step as tables for people."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.text import Text

from jaxpar.aot.compile import CompiledStep
from jaxpar.aot.sent import Sent
from jaxpar.tables import counted, cut, human_bytes, table


def render(found: CompiledStep, advice: str = "") -> Group:
    """What a device holds, computes and sends; `advice` is what to change where it does not fit."""
    parts: list[RenderableType] = [Text(_headline(found)), "", _memory(found), ""]
    if found.compiled:
        parts += [_flops(found), "", _sent(found), "", Text("\n".join(_changes(found))), ""]
    return Group(*parts, Text(_verdict(found, advice)))


def _headline(found: CompiledStep) -> str:
    mesh, step = found.plan.mesh, found.step
    steps = sum(count for count, _ in found.steps)
    return (
        f"{found.phase} on {mesh} ({counted(mesh.size, 'device')} of {found.target}, {found.target.kind.kind}), "
        f"{found.plan.dtype}: {counted(found.batch, 'request')} of {counted(found.context, 'token')}, "
        f"{counted(steps, 'step')}; of the largest, {step.lanes} lanes x {step.tokens} tokens on {step.keys} keys, "
        "what one device does"
    )


def _memory(found: CompiledStep) -> RenderableType:
    memory = found.memory
    rows = [
        ("weights", memory.weights, "exact"),
        ("KV cache", memory.cache, "exact"),
        ("inputs", memory.inputs, "exact"),
    ]
    if found.compiled:
        rows += [
            ("padding of layouts", memory.padding, "compiler"),
            ("temporaries", memory.temporaries or 0, "compiler"),
            ("outputs", memory.outputs, "compiler"),
            ("program", memory.code, "compiler"),
        ]
    elif memory.temporaries is not None:
        rows.append(("temporaries", memory.temporaries, "compiler"))
    rows += [("total", memory.total, ""), (f"{found.target.kind.kind} has", memory.capacity, "")]
    free = memory.capacity - memory.total
    rows.append(("left" if free >= 0 else "missing", abs(free), ""))
    return table("Memory", ("", "one device", "from"), [(name, human_bytes(size), word) for name, size, word in rows])


def _flops(found: CompiledStep) -> RenderableType:
    names = dict.fromkeys([*found.predicted_flops, *found.flops])
    rows = [_flops_row(name, found.predicted_flops.get(name, 0), found.flops.get(name, 0)) for name in names]
    total = _flops_row("total", sum(found.predicted_flops.values()), sum(found.flops.values()))
    return table("FLOPs", ("sublayer", "ledger", "compiled", "compiled / ledger"), [*rows, total])


def _flops_row(name: str, predicted: int, compiled: int) -> tuple[object, ...]:
    return name, f"{predicted:.4g}", f"{compiled:.4g}", f"{compiled / predicted:.4f}" if predicted else "-"


def _sent(found: CompiledStep) -> RenderableType:
    rows: list[tuple[object, ...]] = [
        (
            f"{row.sublayer}: {row.strategy}",
            row.collective + (f" per {row.per}" if row.per else ""),
            "no axes of the mesh" if row.axes is None else ",".join(row.axes),
            _beside(row),
            row.calls,
            human_bytes(row.message_bytes),
            human_bytes(row.sent_bytes),
            f"{1e6 * row.wire_seconds:.4g}",
            f"{1e6 * row.work_seconds:.4g}" if row.asynchronous else "-",
        )
        for row in _worst_first(found.sent)
    ]
    rows.append(("total", "", "", "", *_total(found.sent), "", ""))
    columns = ("strategy", "collective", "axes", "beside it", "calls", "message", "sent", "us a call", "us beside it")
    return table("Sent", columns, rows, left=4)


def _total(sent: Iterable[Sent]) -> tuple[object, ...]:
    rows = list(sent)
    return sum(row.calls for row in rows), "", human_bytes(sum(row.sent_bytes for row in rows))


def _worst_first(sent: Iterable[Sent]) -> list[Sent]:
    return sorted(sent, key=lambda row: -row.calls * row.wire_seconds)


def _beside(row: Sent) -> str:
    """Whether a collective is hidden, and by what."""
    if row.overlap is None:
        return "synchronous"
    if not row.overlap.instructions:
        return "exposed: nothing between start and end"
    work = [counted(row.overlap.products, "product")] if row.overlap.products else []
    work += [f"{row.overlap.others} other"] if row.overlap.others else []
    return f"{row.hidden}: {', '.join(work)} ({', '.join(cut(row.overlap.names, 3))})"


def _changes(found: CompiledStep) -> list[str]:
    lines = [f"The compiler {change}" for change in found.changes]
    return lines or ["The compiler added, merged and removed no collective."]


def _verdict(found: CompiledStep, advice: str) -> str:
    if not found.fits:
        return f"DOES NOT FIT: {advice}"
    lines = [f"FITS: {human_bytes(found.memory.capacity - found.memory.total)} of {found.target.kind.kind} are left."]
    if not found.agrees:
        lines.append(
            f"DISAGREES: the compiled program has {found.flops_ratio:.4g} times the FLOPs of the ledger, "
            "of which it may differ by 2 %."
        )
    exposed = sum(row.calls * row.wire_seconds for row in found.sent if row.hidden != "hidden" and not row.per)
    hidden = sum(row.calls * row.wire_seconds for row in found.sent if row.hidden == "hidden" and not row.per)
    lines.append(
        f"By the links' figures {1e6 * exposed:.4g} us of sending are exposed or only partly hidden, and "
        f"{1e6 * hidden:.4g} us hidden; it was compiled in {found.compile_seconds:.1f} s."
    )
    return "\n".join(lines)
