"""What ran on each device, read from a trace.

Backends record it differently:

- CPU: one plane for the whole process, whose lines are threads. The runs of an XLA operation are the events that have
  an `hlo_op`; they say which device they ran for (`device_ordinal`) and of which program (`program_id`). Faked devices
  share a pool of threads, so a line is not a device.
- TPU, GPU: one plane a device. On a TPU its line "XLA Ops" holds the operations, named by their HLO text, and the line
  "XLA Modules" the programs; on a GPU the lines "Stream #..." hold kernels that have an `hlo_op`.

The trace carries the optimised HLO of every program that ran (`jaxpar.profile.programs`), which says what an operation
is and under which named scope it was written.
"""

from __future__ import annotations

import bisect
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxpar.errors import JaxparError
from jaxpar.profile.programs import Operation, guess, programs

_ACCELERATOR = re.compile(r"/device:(TPU|GPU):\d+")


class Collective(NamedTuple):
    """`kind` in HLO's words (all-reduce, all-gather, ...) and the "<sublayer>:<strategy>" it runs for, or ""."""

    kind: str
    scope: str


class Span(NamedTuple):
    """One run of an operation on a device, in nanoseconds; `collective` is None if it computes, `scope` for whom."""

    begin: float
    end: float
    collective: Collective | None
    is_call: bool
    scope: str = ""


def read_spans(path: Path) -> dict[str, list[Span]]:
    """The runs of operations on each device ("cpu:3") that a trace (*.xplane.pb) holds.

    Raises:
        JaxparError: the file does not parse.
    """
    raw = path.read_bytes()
    try:
        profile = jax.profiler.ProfileData.from_serialized_xspace(raw)
        operations = programs(raw)
    except (RuntimeError, ValueError, IndexError) as error:
        raise JaxparError(f"{path}: not a trace that can be read ({error}); record it again") from error
    with warnings.catch_warnings():
        # jaxlib makes its iterator types on first use; Python 3.12 warns of them, and as an error that aborts in C++.
        warnings.filterwarnings("ignore", message="builtin type .* has no __module__", category=DeprecationWarning)
        return _spans(list(profile.planes), operations)


def _spans(planes: list[Any], operations: dict[str, dict[str, Operation]]) -> dict[str, list[Span]]:
    spans: dict[str, list[Span]] = defaultdict(list)
    accelerators = [plane for plane in planes if _ACCELERATOR.fullmatch(plane.name)]
    for plane in accelerators or planes:
        for device, program, name, event in _accelerator_events(plane) if accelerators else _cpu_events(plane):
            operation = operations.get(program, {}).get(name) or guess(name)
            if operation.is_control_flow or not event.duration_ns:
                continue
            collective = Collective(operation.collective, operation.scope) if operation.collective else None
            end = event.start_ns + event.duration_ns
            spans[device].append(Span(event.start_ns, end, collective, not operation.is_done, operation.scope))
    return dict(spans)


def _cpu_events(plane: Any) -> Iterator[tuple[str, str, str, Any]]:
    """(device, program, operation, event) for each run of an operation that the process's plane holds."""
    for event in (event for line in plane.lines for event in line.events):
        stats = dict(event.stats)
        if "hlo_op" in stats and "device_ordinal" in stats:
            program = f"{stats['hlo_module']}({stats['program_id']})"
            yield f"cpu:{stats['device_ordinal']}", program, stats["hlo_op"], event


def _accelerator_events(plane: Any) -> Iterator[tuple[str, str, str, Any]]:
    """(device, program, operation, event) for each operation or kernel that a device's plane holds."""
    lines = list(plane.lines)
    modules = sorted((e.start_ns, e.name) for line in lines if line.name == "XLA Modules" for e in line.events)
    kind, number = plane.name.removeprefix("/device:").split(":")
    for line in lines:
        if line.name != "XLA Ops" and not line.name.startswith("Stream #"):
            continue
        for event in line.events:
            stats = dict(event.stats)
            if "program_id" in stats:
                program = f"{stats.get('hlo_module')}({stats['program_id']})"
            else:
                at = bisect.bisect(modules, event.start_ns, key=lambda module: module[0])
                program = modules[at - 1][1] if at else ""
            name = stats.get("hlo_op") or event.name.split(" = ")[0].lstrip("%")
            yield f"{kind.lower()}:{number}", program, name, event
