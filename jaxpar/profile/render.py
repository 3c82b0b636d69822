"""A profile's summary as tables."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table

from jaxpar.profile.summary import ProfileSummary


def render(summary: ProfileSummary) -> Group:
    """Two tables: the collectives of the mean device, and the time of every device."""
    mean = summary.mean()
    where = Table(title="Mean device: where the time goes", title_justify="left")
    for name in ("strategy", "operation", "calls", "ms", "us a call", "share"):
        where.add_column(name, justify="left" if name in ("strategy", "operation") else "right")
    where.add_row("", "compute", "", _ms(mean.compute), "", f"{mean.compute / mean.wall:.1%}")
    for c in summary.collectives:
        seconds, calls = mean.collectives[c], mean.calls[c]
        each = f"{1e6 * seconds / calls:.1f}" if calls else ""
        where.add_row(c.scope, c.kind, f"{calls:g}", _ms(seconds), each, f"{seconds / mean.wall:.1%}")
    where.add_row("", "idle", "", _ms(mean.idle), "", f"{mean.idle / mean.wall:.1%}", end_section=True)
    where.add_row("", "wall", "", _ms(mean.wall), "", "")

    by_kind = mean.by_kind()
    kinds = sorted(by_kind, key=lambda kind: -by_kind[kind])
    each_device = Table(title="Each device, ms", title_justify="left")
    each_device.add_column("device")
    for name in ("compute", *kinds, "idle", "wall"):
        each_device.add_column(name, justify="right")
    for time in (*summary.devices, mean):
        if time is mean:
            each_device.add_section()
        spent = time.by_kind()
        cells = (time.compute, *(spent.get(kind, 0.0) for kind in kinds), time.idle, time.wall)
        each_device.add_row(time.device, *(_ms(seconds) for seconds in cells))
    if not summary.devices[0].device.startswith("cpu:"):
        return Group(where, each_device)
    note = (
        "On a CPU a collective's time is mostly waiting until the other devices arrive: they share this machine's "
        "cores.\nIt shows where the devices meet, not what a network would cost."
    )
    return Group(where, each_device, note)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"
