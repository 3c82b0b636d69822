"""`jaxpar doctor`: what this machine has, and whether every strategy gives there what a CPU gives."""

from __future__ import annotations

import math
import os
import platform as host
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group

from jaxpar.cli.options import Dtype, Json, Platform
from jaxpar.cli.output import OUT, human_bytes, print_json, progress
from jaxpar.cli.prompts import builtin_prompts
from jaxpar.cli.verify_all import all_passed, outcomes_json, render_outcomes
from jaxpar.errors import RequestError
from jaxpar.tables import counted

if TYPE_CHECKING:
    from jaxpar.doctor.machine import DeviceGroup
    from jaxpar.doctor.packages import Compiler, Extra, Package

_NEW_TOKENS = 4


def doctor(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="What the strategies run; the bundled one has experts and is small.")
    ] = "tiny-moe",
    devices: Annotated[
        int | None, typer.Option(help="How many devices the strategies run on; default: all, of a CPU 8 faked ones.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Say what is there, and run nothing.")] = False,
    budget: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Start no further strategy after so many seconds.")
    ] = None,
    dtype: Dtype = None,
    platform: Platform = None,
    json: Json = False,
) -> None:
    """Say what this machine has, and prove every strategy on it.

    Devices, their memory and links, JAX and what belongs to it, the accelerators that programs can be compiled for.
    Then every strategy runs at a small shape, and each logit and token of every rank is compared with one device of the
    CPU. Exit status 1 if anything differs, or if nothing ran; with --quick 0.
    """
    begin = time.monotonic()
    if budget is not None and not 0 <= budget < math.inf:
        raise RequestError(f"budget={budget}: it must be 0 or above, and finite")
    if quick and budget is not None:
        raise RequestError("--quick runs nothing, and --budget says for how long to run: give either")
    with progress("Looking for devices") as status:
        from jaxpar.assets import model_dir
        from jaxpar.checkpoint import open_checkpoint
        from jaxpar.devices import devices_at_hand
        from jaxpar.doctor.machine import device_groups
        from jaxpar.doctor.packages import find_compilers, find_extras, find_packages
        from jaxpar.doctor.ways import prove, ways_of
        from jaxpar.engine.prompts import encode_prompts

        found = devices_at_hand(platform, devices)
        groups, packages, extras, compilers = device_groups(found), find_packages(), find_extras(), find_compilers()
        document = {
            "devices": [asdict(group) | {"nodes": group.nodes} for group in groups],
            "host": _host(),
            "packages": [asdict(one) for one in packages],
            "extras": [asdict(one) for one in extras],
            "compilers": [asdict(one) for one in compilers],
        }
        if not json:
            status.stop()
            OUT.print(describe_machine(groups, packages, extras, compilers), markup=False)
        if quick:
            if json:
                print_json(document)
            return

    with progress("Loading onto one device of the CPU") as status:
        checkpoint = open_checkpoint(model_dir(model))
        checkpoint.require_reader()
        count, kind = len(found), found[0].platform
        dtype = dtype or ("float32" if kind == "cpu" else "bfloat16")
        prompts = encode_prompts(
            checkpoint, builtin_prompts(checkpoint.config, max(4, count), _NEW_TOKENS), _NEW_TOKENS
        )
        ways = ways_of(checkpoint.config, kind, count)
        until = math.inf if budget is None else begin + budget
        outcomes = [
            *prove(checkpoint, ways, kind, dtype, prompts, _NEW_TOKENS, until=until, progress=status.say)
        ]  # fmt: skip
    seconds = time.monotonic() - begin
    if json:
        print_json(document | {"model": model, "dtype": dtype} | outcomes_json(outcomes) | {"seconds": seconds})
    else:
        what = f"{model} on {counted(count, f'{kind} device')} against one of the CPU in {dtype}"
        OUT.print(Group("", render_outcomes(outcomes, what, seconds)), markup=False)
    raise typer.Exit(0 if all_passed(outcomes) else 1)


def _host() -> dict[str, Any]:
    return {"python": host.python_version(), "system": f"{host.system()} {host.machine()}", "cores": os.cpu_count()}


def describe_machine(
    groups: Sequence[DeviceGroup],
    packages: Sequence[Package],
    extras: Sequence[Extra],
    compilers: Sequence[Compiler],
) -> str:
    """What was found, in lines under headings."""
    of_host = _host()
    sections = {
        "devices": [line for one in groups for line in _lines(one)],
        "host": [f"Python {of_host['python']}, {of_host['system']}, {counted(of_host['cores'], 'core')}"],
        "packages": [", ".join(map(_package, packages))],
        "extras": ["; ".join((f"{one.name}: {one.state}", *one.problems)) for one in extras],
        "compiles for": [_compiler(one) for one in compilers],
    }
    return "\n".join(
        f"{name * (at == 0):14}{line}" for name, lines in sections.items() for at, line in enumerate(lines)
    )


def _lines(group: DeviceGroup) -> list[str]:
    """What is known of some devices: how many, their memory, their speed, their links."""
    grid = "" if group.grid is None else f", chips {'x'.join(map(str, group.grid))}"
    faked = " (faked)" if group.platform == "cpu" else ""
    processes = "one process" if group.processes == 1 else f"{group.processes} processes"
    lines = [f"{group.count} x {group.kind}{faked} by {group.platform}, in {processes}{grid}"]
    figures = group.figures
    source = f"preset {group.preset}" if group.preset is not None else "its maker's figures"
    if group.memory_bytes is not None:
        used = "" if group.memory_in_use is None else f", {human_bytes(group.memory_in_use)} in use"
        by = f" by {source}" if group.memory_in_use is None else ""
        lines.append(f"memory of each: {human_bytes(group.memory_bytes)}{by}{used}")
    if figures is None:
        lines.append("speed and links: no preset knows this kind; `jaxpar calibrate` measures them")
        return lines
    lines.append(
        f"speed by {source}: {figures.peak_bf16_flops / 1e12:g} TFLOP/s in bfloat16, "
        f"{figures.memory_bandwidth / 1e12:g} TB/s of memory"
    )
    among, place = f"the {figures.devices_per_node} of a node", "node"
    if figures.topology == "torus":
        among, place = "those of a slice", "slice"
    lines.append(
        f"links by {source}: {figures.link_bandwidth / 1e9:g} GB/s one way among {among}, "
        f"{figures.internode_bandwidth / 1e9:g} between {place}s; {counted(group.nodes or 1, place)}"
    )
    return lines


def _package(one: Package) -> str:
    asked = f" (JAX asks for {one.wanted})" if not one.matches else ""
    return f"{one.name} {one.version}{asked}"


def _compiler(one: Compiler) -> str:
    return f"{one.platform}: no, {one.problem}" if one.problem else f"{one.platform}: by {' and '.join(one.packages)}"
