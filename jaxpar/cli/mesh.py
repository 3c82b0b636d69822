"""`jaxpar mesh`: who each rank of a mesh is."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxpar.cli.options import Json
from jaxpar.cli.output import OUT, print_json

if TYPE_CHECKING:
    from jaxpar.presets import DeviceKind


def mesh(
    spec: Annotated[
        str, typer.Argument(metavar="MESH", help='Axis sizes ("dp=2,tp=4"), a preset\'s name, or a mesh TOML.')
    ],
    experts_over: Annotated[
        str | None, typer.Option(help='Axes that experts are split over; default: "ep", or the preset\'s.')
    ] = None,
    json: Json = False,
) -> None:
    """Print who each rank of a mesh is, also in SGLang's words.

    Any axis may have any size: no device is needed.
    """
    from jaxpar.mesh import AXES, parse_experts_over, rank_table, sglang_sizes
    from jaxpar.presets import resolve_mesh

    sizes, preset = resolve_mesh(spec)
    default = preset.experts_over if preset else ("ep",)
    axes = default if experts_over is None else parse_experts_over(experts_over)
    rows, sglang = rank_table(sizes, axes), sglang_sizes(sizes, axes)
    if json:
        document: dict[str, Any] = {
            "mesh": sizes.sizes,
            "experts_over": axes,
            "ranks": [asdict(row) for row in rows],
            "sglang": sglang,
        }
        print_json(document | ({"preset": asdict(preset)} if preset else {}))
        return
    if preset is not None:
        OUT.print(f"{preset.name}: {preset.description}", markup=False)
    experts = f", experts over {','.join(axes)}" if sizes.extent(axes) > 1 else ""
    OUT.print(f"{sizes}: {sizes.size} rank{'s' * (sizes.size > 1)}{experts}\n")
    # Axes of one rank say nothing.
    shown = [*(sizes.active(AXES) or ("tp",)), *(["expert_rank"] if experts else [])]
    header = ["rank", *(name.replace("_", " ") for name in shown)]
    # Written line by line: a rich table of 65,536 ranks takes 15 s.
    widths = [max(len(name), len(str(sizes.size))) for name in header]
    for cells in (header, *([row.rank, *(getattr(row, name) for name in shown)] for row in rows)):
        print("  ".join(str(cell).rjust(width) for cell, width in zip(cells, widths, strict=True)))
    OUT.print("\nIn SGLang's words: " + ", ".join(f"{name} {size}" for name, size in sglang.items()))
    if preset is not None:
        OUT.print(_device(preset.device), markup=False)


def _device(device: DeviceKind) -> str:
    return (
        f"Each device ({device.kind}): {device.memory_bytes / 1e9:g} GB, {device.peak_bf16_flops / 1e12:g} TFLOP/s in "
        f"bfloat16, {device.memory_bandwidth / 1e12:g} TB/s of memory; one way {device.link_bandwidth / 1e9:g} GB/s "
        f"among the {device.devices_per_node} of a node, {device.internode_bandwidth / 1e9:g} GB/s between nodes"
    )
