"""A pipeline as tables: its timetable and bubble, the stages of a model, and the chunks of a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.table import Table

from jaxpar.pipeline.prompt import Chunked
from jaxpar.pipeline.timetable import Timetable
from jaxpar.tables import counted, cut, table

_FIRST_TICKS, _LAST_TICKS, _CHUNKS_SHOWN = 16, 8, 24


def timetable_table(timetable: Timetable) -> Table:
    """A row for each stage, a column for each tick: the item, in decode its group; the middle of many is left out."""
    groups = timetable.groups or timetable.items
    rows = [["." if item < 0 else item % groups for item in row] for row in timetable.slots.tolist()]
    ticks = _without_middle([*range(timetable.ticks)])
    return table("", ("tick", *ticks), [(f"stage {stage}", *_without_middle(row)) for stage, row in enumerate(rows)])


def bubble(timetable: Timetable, requests: int | None = None) -> str:
    """Idle slots, their share, where it comes from, and what to give more of; groups only if `requests` are enough."""
    p, g = timetable.stages, timetable.groups
    slots, share = p * timetable.ticks, timetable.idle_share
    said = f"{timetable.idle_slots} of {slots} slots idle: {100 * float(share):.2f} %"
    if not g:
        m = timetable.items
        return f"{said} = (p-1)/(m+p-1) = {p - 1}/{m + p - 1}"
    if g >= p:
        return f"{said}, while the pipe fills and drains; with {counted(g, 'group')} it is full in between"
    return (
        f"{said}; each round of {counted(p, 'tick')} leaves a stage idle in (p-g)/p = {p - g}/{p} of them: "
        f"give {p} {'groups' if requests is None or requests >= p else 'requests'} or more"
    )


def timetable_json(timetable: Timetable) -> dict[str, Any]:
    """Every slot: the item, null where a stage is idle; item i of decode is token i // groups of group i % groups."""
    share = timetable.idle_share
    return {
        "items": timetable.items,
        "ticks": timetable.ticks,
        **({"groups": timetable.groups} if timetable.groups else {}),
        "timetable": [[None if item < 0 else item for item in row] for row in timetable.slots.tolist()],
        "idle_slots": timetable.idle_slots,
        "idle_share": float(share),
        "idle_share_exact": str(share),
    }


def stages_table(layers: Sequence[int], work: np.ndarray) -> Table:
    """Which layers each stage has, and its work over the mean."""
    firsts = np.cumsum([0, *layers]).tolist()
    rows = [
        (stage, f"{first}-{first + count - 1}" if count > 1 else first, count, f"{part:.3f}")
        for stage, (first, count, part) in enumerate(zip(firsts, layers, work / work.mean(), strict=False))
    ]
    return table("", ("stage", "layers", "count", "work/mean"), rows, left=2)


def chunks_table(ways: Mapping[str, Chunked]) -> Table:
    """Tokens and cost of each chunk, in units of the mean of equal ones; the middle of many is left out."""
    unit = ways["equal"].costs.sum() / len(ways["equal"].sizes)
    longest = max(len(way.sizes) for way in ways.values())
    columns = [cut([*map(str, range(longest))], _CHUNKS_SHOWN)]
    for way in ways.values():
        costs = [f"{cost / unit:.3f}" for cost in way.costs.sum(axis=1)]
        for cells in (way.sizes, costs):
            columns.append(cut([*map(str, cells), *[""] * (longest - len(cells))], _CHUNKS_SHOWN))
    names = [name for way in ways for name in (f"{way}: tokens", "cost")]
    return table("", ("chunk", *names), [*zip(*columns, strict=True)])


def schedules_table(ways: Mapping[str, Chunked]) -> Table:
    """How long each schedule takes, in mean equal chunks on a mean stage, its idle share, and what is saved."""
    equal = ways["equal"]
    rows = []
    for name in equal.schedules:
        row = [name]
        for way in ways.values():
            one = way.schedules[name]
            row += [f"{one.duration / equal.costs.mean():.3f}", f"{100 * way.idle_share(one):.2f} %"]
            row += [f"{100 * saving(equal, way, name):.2f} %"] if way is not equal else []
        rows.append(row)
    names = [part for way in ways for part in (way, "idle", *([] if way == "equal" else ["saved"]))]
    return table("", ("time", *names), rows)


def saving(equal: Chunked, other: Chunked, name: str) -> float:
    """The part of a schedule's time that other chunks save."""
    return 1 - other.schedules[name].duration / equal.schedules[name].duration


def chunks_json(ways: Mapping[str, Chunked]) -> dict[str, Any]:
    """Each way: its chunks, and durations in FLOPs of the stage that everything waits for."""
    return {
        name: {
            "chunks": [
                {"first": first, "tokens": size, "flops": costs}
                for first, size, costs in zip(way.firsts, way.sizes, way.costs.tolist(), strict=True)
            ],
            "schedules": {
                schedule: {
                    "duration": one.duration,
                    "idle_share": way.idle_share(one),
                    "saved": saving(ways["equal"], way, schedule),
                }
                for schedule, one in way.schedules.items()
            },
        }
        for name, way in ways.items()
    }


def _without_middle(cells: Sequence[object]) -> list[str]:
    shown = [*map(str, cells)]
    if len(shown) <= _FIRST_TICKS + _LAST_TICKS:
        return shown
    return [*shown[:_FIRST_TICKS], "...", *shown[-_LAST_TICKS:]]
