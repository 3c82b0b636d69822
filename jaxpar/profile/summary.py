"""Adding a trace up: seconds of compute, of each collective, and idle."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxpar.errors import JaxparError
from jaxpar.profile.trace import Collective, Span, read_spans


@dataclass(frozen=True)
class DeviceTime:
    """Seconds of one device; `compute + sum(collectives.values()) + idle == wall`.

    A moment at which a device computes is compute, also if a collective runs at the same time: a collective's time is
    what it adds. `wall` runs from the first operation on any device to the last, so waiting for the host is idle.
    `computes` are the parts of `compute` by the "<sublayer>:<strategy>" that they run for, or "".
    """

    device: str
    wall: float
    compute: float
    idle: float
    collectives: dict[Collective, float]
    calls: dict[Collective, float]
    computes: dict[str, float] = field(default_factory=dict)

    def by_kind(self) -> dict[str, float]:
        """Seconds in collectives of each kind, whatever strategy they run for."""
        seconds: dict[str, float] = defaultdict(float)
        for collective, spent in self.collectives.items():
            seconds[collective.kind] += spent
        return dict(seconds)

    def of(self, sublayer: str) -> float:
        """Seconds of compute and of collectives that run for a sublayer, whatever its strategy."""
        times = [*self.computes.items(), *((c.scope, spent) for c, spent in self.collectives.items())]
        return sum(spent for scope, spent in times if scope.startswith(f"{sublayer}:"))


@dataclass(frozen=True)
class ProfileSummary:
    """One row a device, in the order of the devices."""

    devices: tuple[DeviceTime, ...]

    @property
    def collectives(self) -> list[Collective]:
        """Every collective that any device ran, the one that takes longest first."""
        mean = self.mean().collectives
        return sorted(mean, key=lambda collective: (-mean[collective], collective))

    def share(self, sublayer: str) -> float:
        """The part of the mean device's time that goes into compute and collectives of a sublayer."""
        mean = self.mean()
        return mean.of(sublayer) / mean.wall

    def mean(self) -> DeviceTime:
        """The mean over the devices; one that never ran a collective spent 0 seconds in it."""
        count = len(self.devices)
        seconds: Counter[Collective] = Counter()
        calls: Counter[Collective] = Counter()
        computes: Counter[str] = Counter()
        for device in self.devices:
            seconds.update(device.collectives)
            calls.update(device.calls)
            computes.update(device.computes)
        return DeviceTime(
            device="mean",
            wall=sum(d.wall for d in self.devices) / count,
            compute=sum(d.compute for d in self.devices) / count,
            idle=sum(d.idle for d in self.devices) / count,
            collectives={c: s / count for c, s in seconds.items()},
            calls={c: n / count for c, n in calls.items()},
            computes={scope: s / count for scope, s in computes.items()},
        )

    def to_json(self) -> dict[str, Any]:
        """The rows as JSON types; times are in seconds."""

        def row(time: DeviceTime) -> dict[str, Any]:
            collectives = [
                {"kind": c.kind, "scope": c.scope, "calls": time.calls[c], "seconds": time.collectives[c]}
                for c in self.collectives
                if c in time.collectives
            ]
            times = {"wall": time.wall, "compute": time.compute, "idle": time.idle}
            return {"device": time.device, **times, "collectives": collectives}

        return {"mean": row(self.mean()), "devices": [row(device) for device in self.devices]}


def summarize(directory: Path) -> ProfileSummary:
    """Read the newest trace that `profiled` wrote under `directory`.

    Raises:
        JaxparError: there is none, it does not parse, or no device did anything in it.
    """
    traces = sorted(directory.glob("plugins/profile/*/*.xplane.pb"), key=lambda path: path.stat().st_mtime_ns)
    if not traces:
        raise JaxparError(f"{directory}: no trace is in it; name a directory that a profile was written to")
    path = traces[-1]
    spans = read_spans(path)
    if not spans:
        raise JaxparError(f"{path}: no device ran anything while this was recorded; profile a part that does")
    begin = min(span.begin for device in spans.values() for span in device)
    end = max(span.end for device in spans.values() for span in device)
    names = sorted(spans, key=lambda name: int(name.split(":")[1]))
    return ProfileSummary(tuple(_device_time(name, spans[name], end - begin) for name in names))


def _device_time(device: str, spans: list[Span], wall_ns: float) -> DeviceTime:
    spent = exposed(spans)
    idle = wall_ns - sum(spent.values())
    compute = spent.pop(None, 0.0)
    # Alone, what computes takes just those moments that are compute; of several at once the first one takes them.
    computes = exposed([span._replace(collective=Collective("", span.scope)) for span in spans if not span.collective])
    calls = Counter(span.collective for span in spans if span.collective and span.is_call)
    collectives = sorted(c for c in spent.keys() | calls.keys() if c)
    return DeviceTime(
        device,
        wall=wall_ns * 1e-9,
        compute=compute * 1e-9,
        idle=idle * 1e-9,
        collectives={c: spent.get(c, 0.0) * 1e-9 for c in collectives},
        calls={c: float(calls[c]) for c in collectives},
        computes={activity.scope: ns * 1e-9 for activity, ns in computes.items() if activity},
    )


def exposed(spans: list[Span]) -> dict[Collective | None, float]:
    """Nanoseconds of each activity, every moment given to one: compute, else the collective that began first."""
    edges = [(s.begin, 1, s.collective) for s in spans] + [(s.end, -1, s.collective) for s in spans]
    edges.sort(key=lambda edge: edge[:2])
    spent: dict[Collective | None, float] = defaultdict(float)
    running: dict[Collective | None, int] = {}
    last = 0.0
    for now, change, activity in edges:
        if running:
            spent[None if None in running else next(iter(running))] += now - last
        running[activity] = running.get(activity, 0) + change
        if not running[activity]:
            del running[activity]
        last = now
    return dict(spent)
