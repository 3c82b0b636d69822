"""A profile's summary as tables."""

from __future__ import annotations

from rich.console import Group

from jaxpar.profile.summary import ProfileSummary
from jaxpar.tables import table

_CPU_NOTE = (
    "On a CPU a collective's time is mostly waiting until the other devices arrive: they share this machine's cores.\n"
    "It shows where the devices meet, not what a network would cost."
)


def render(summary: ProfileSummary) -> Group:
    """Two tables: the collectives of the mean device, and the time of every device."""
    mean = summary.mean()
    rows = [("", "compute", "", _ms(mean.compute), "", f"{mean.compute / mean.wall:.1%}")]
    for c in summary.collectives:
        seconds, calls = mean.collectives[c], mean.calls[c]
        each = f"{1e6 * seconds / calls:.1f}" if calls else ""
        rows.append((c.scope, c.kind, f"{calls:g}", _ms(seconds), each, f"{seconds / mean.wall:.1%}"))
    rows.append(("", "idle", "", _ms(mean.idle), "", f"{mean.idle / mean.wall:.1%}"))
    rows.append(("", "wall", "", _ms(mean.wall), "", ""))
    columns = ("strategy", "operation", "calls", "ms", "us a call", "share")
    where = table("Mean device: where the time goes", columns, rows, left=2)

    by_kind = mean.by_kind()
    kinds = sorted(by_kind, key=lambda kind: -by_kind[kind])
    times = []
    for time in (*summary.devices, mean):
        spent = time.by_kind()
        cells = (time.compute, *(spent.get(kind, 0.0) for kind in kinds), time.idle, time.wall)
        times.append((time.device, *map(_ms, cells)))
    each_device = table("Each device, ms", ("device", "compute", *kinds, "idle", "wall"), times)
    note = ("", _CPU_NOTE) if summary.devices[0].device.startswith("cpu:") else ()
    return Group(where, "", each_device, *note)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"
