"""`jaxpar calibrate`: what this machine really does, as a preset."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jaxpar.cli.options import Json, Platform
from jaxpar.cli.output import OUT, print_json, progress


def calibrate(
    out: Annotated[Path, typer.Option(metavar="FILE", help="The preset to write, a .toml file.")],
    mesh: Annotated[
        str | None,
        typer.Option(
            help="Mesh of the preset; of another preset what its maker says stays. Default: all devices on tp."
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the fits against what was measured, as a PNG.")
    ] = None,
    platform: Platform = None,
    json: Json = False,
) -> None:
    """Measure what this machine really does, as a preset.

    Nobody else may use the machine meanwhile. On a CPU eight devices are faked, unless --mesh asks for others; they
    share its cores, and all of them work at once. The preset is a mesh for every other command.
    """
    from jaxpar.calibrate.files import check_writable, write_preset
    from jaxpar.pictures import check_picture, require_matplotlib

    check_writable(out)
    if plot is not None:
        require_matplotlib(plot)
        check_picture(plot)
    from jaxpar.calibrate.measure import calibrate as measure
    from jaxpar.devices import devices_at_hand
    from jaxpar.mesh import MeshSpec
    from jaxpar.presets import resolve_mesh

    spec, preset = resolve_mesh(MeshSpec(tp=len(devices_at_hand(platform, None))) if mesh is None else mesh)
    with progress("Measuring") as shown:
        found = measure(spec, preset, platform, say=lambda text: shown.say(f"Measuring: {text}"))
    write_preset(found, out, f"{spec} on {found.device.kind}, as `jaxpar calibrate` measured it")
    if plot is not None:
        from jaxpar.calibrate.plot import draw

        draw(found, plot)
    if json:
        print_json(found.to_json() | {"out": str(out)})
        return
    from jaxpar.calibrate.render import render

    OUT.print(render(found))
    OUT.print(f"\nWritten to {out}: --mesh {out} takes it")
