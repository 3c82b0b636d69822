"""A ledger as tables for people."""

from __future__ import annotations

from collections import Counter

from rich.console import Group, RenderableType
from rich.text import Text

from jaxpar.ledger.report import Ledger
from jaxpar.ledger.rounds import in_words
from jaxpar.presets import Preset
from jaxpar.tables import counted, human_bytes, table


def render(ledger: Ledger, preset: Preset | None = None) -> Group:
    """Traffic, FLOPs and memory of one rank; `preset` adds what its device offers."""
    parts: list[RenderableType] = [Text(_headline(ledger)), *_stages(ledger), "", _steps(ledger), "", *_auto(ledger)]
    parts += [_traffic(ledger), "", _flops(ledger), "", *_work(ledger), _memory(ledger, preset), ""]
    parts += [*_latents(ledger), Text(_verdict(ledger))]
    return Group(*parts)


def render_sent(ledger: Ledger) -> Group:
    """Traffic of one rank alone."""
    return Group(*_auto(ledger), _traffic(ledger), "", Text(_verdict(ledger)))


def _headline(ledger: Ledger) -> str:
    mesh = ledger.plan.mesh
    return (
        f"{ledger.phase} on {mesh} ({counted(mesh.size, 'device')}), {ledger.plan.dtype}: "
        f"{counted(ledger.batch, 'request')} of {counted(ledger.seq, 'token')} on "
        f"{counted(mesh.dp * mesh.ep, 'replica')}; what one rank does"
    )


def _stages(ledger: Ledger) -> list[RenderableType]:
    if len(ledger.stages) == 1:
        return []
    layers = ", ".join(map(str, ledger.stages))
    lines = [Text(f"Stages of {layers} layers; a step is a tick of all of them, and {ledger.idle_share:.2%} are idle")]
    return [*lines, *_boundaries(ledger)]


def _boundaries(ledger: Ledger) -> list[RenderableType]:
    sent, mesh = ledger.boundaries, ledger.plan.mesh
    if sent is None:
        return []
    ranks = [f"rank of {axis}" for axis in mesh.active(("cp", "tp"))]
    first = " and ".join(["replica"] * (mesh.dp * mesh.ep > 1) + ranks)
    line = (
        f"All boundaries together{first and f', of the first {first}'}: {sent.sent_bytes:,} bytes in "
        f"{counted(sent.hops, 'hop')} of each of {counted(sent.items, 'item')}, "
        f"{sent.unused_bytes:,} of them padding and idle ticks"
    )
    return [Text(line)]


def _steps(ledger: Ledger) -> RenderableType:
    # Where tokens of all ranks are gathered without padding; elsewhere there is nothing to say.
    has_room = any(part.step.room for part in ledger.steps)
    rows = [
        (
            part.count,
            part.step.lanes,
            part.step.tokens,
            part.step.keys,
            *([part.step.room or "all"] if has_room else []),
            human_bytes(sum(row.sent_bytes for row in part.all_traffic)),
            f"{sum(part.all_flops.values()):.4g}",
        )
        for part in ledger.steps
    ]
    room = ("rows gathered",) if has_room else ()
    columns = ("steps", "lanes", "tokens a lane", "keys a lane", *room, "sent a step", "FLOPs a step")
    return table("Steps", columns, rows, left=0)


def _auto(ledger: Ledger) -> list[RenderableType]:
    steps: Counter[tuple[str, str, str]] = Counter()
    for part in ledger.steps:
        steps.update({(sublayer, *choice): part.count for sublayer, choice in part.auto.items()})
    rows = [(count, *chosen) for chosen, count in steps.items()]
    return [table("Chosen by auto", ("steps", "sublayer", "strategy", "why"), rows, left=4), ""] if rows else []


def _traffic(ledger: Ledger) -> RenderableType:
    rows = [
        (
            f"{row.sublayer}: {row.strategy}",
            row.collective + in_words(row.per, ledger.rounds),
            ",".join(row.axes),
            row.calls,
            row.steps,
            human_bytes(row.message_bytes),
            human_bytes(row.sent_bytes / row.calls),
            human_bytes(row.sent_bytes),
        )
        for row in ledger.traffic
    ]
    calls = sum(row.calls for row in ledger.traffic)
    rows.append(("total", "", "", calls, ledger.sent_steps, "", "", human_bytes(ledger.sent_bytes)))
    columns = ("strategy", "collective", "axes", "calls", "steps", "message", "sent a call", "sent")
    return table("Sent", columns, rows, left=3)


def _flops(ledger: Ledger) -> RenderableType:
    rows = [(name, f"{count:.4g}") for name, count in ledger.flops.items()]
    return table("FLOPs", ("sublayer", "FLOPs"), [*rows, ("total", f"{sum(ledger.flops.values()):.4g}")])


def _work(ledger: Ledger) -> list[RenderableType]:
    work = ledger.work
    if work is None or ledger.plan.mesh.cp == 1:
        return []
    rows = [(rank, *pairs) for rank, pairs in enumerate(zip(work.seen, work.computed, strict=True))]
    title = f"Attention of a request: pairs of a query vector and a key, layout {ledger.plan.layout}"
    summary = (
        f"The slowest rank sees {work.imbalance:.4g} times the mean. Tiles compute {work.excess:.4g} times the pairs "
        f"that queries see; the FLOPs above count all tiles, as if none were left out."
    )
    return [table(title, ("rank of cp", "seen", "computed"), rows, left=0), Text(summary), ""]


def _memory(ledger: Ledger, preset: Preset | None) -> RenderableType:
    ranks = ledger.plan.mesh.size
    rows = [
        ("weights", human_bytes(ledger.weight_bytes), human_bytes(ledger.weight_bytes * ranks)),
        ("KV cache", human_bytes(ledger.cache_bytes), human_bytes(ledger.cache_bytes * ranks)),
    ]
    if ledger.copied_cache_bytes:
        rows.append(("  copies and padding over tp", "", human_bytes(ledger.copied_cache_bytes)))
    if ledger.needed_cache_bytes < ledger.cache_bytes:
        needed = ledger.needed_cache_bytes
        rows.append((f"  needed of its {ledger.pages} pages", human_bytes(needed), ""))
    if ledger.compiled is not None:
        name = f"temporaries ({ledger.compiled.backend} compiler)"
        rows.append((name, human_bytes(ledger.compiled.temporary_bytes), ""))
    if preset is not None:
        rows.append((f"{preset.device.kind} has", human_bytes(preset.device.memory_bytes), ""))
    return table("Memory", ("", "one rank", "all ranks"), rows)


def _latents(ledger: Ledger) -> list[RenderableType]:
    latents, mesh = ledger.latents, ledger.plan.mesh
    if latents is None:
        return []
    weights, cache, held = map(human_bytes, (latents.weight_bytes, latents.cache_bytes, latents.read(mesh.tp)))
    text = (
        f"Every rank of tp={mesh.tp} holds the latents of its requests. Attention's weights {weights} / tp and latents "
        f"{cache} x tp / {mesh.size} are {held} a rank, and least at tp = {latents.best_tp:.3g}."
    )
    return [Text(text), ""]


def _verdict(ledger: Ledger) -> str:
    lines = ledger.differences or ["Predicted by closed form = traced from the jaxpr: every call, byte and FLOP."]
    if ledger.compiled is not None:
        lines = lines + [f"XLA {change}" for change in ledger.compiled.changes]
        if not ledger.compiled.changes:
            lines = [*lines, "XLA added, merged and removed no collective."]
    return "\n".join(lines)
