"""`jaxpar balance`: copies of experts and their devices, chosen from loads, and what that does to each device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxpar.cli.options import Json
from jaxpar.cli.output import OUT, print_json, table
from jaxpar.tables import counted, cut

if TYPE_CHECKING:
    import numpy as np
    from rich.table import Table

    from jaxpar.moe.balance import Placement

    # Before and after: the load of each device [layers, devices], and the largest over the mean [layers].
    _Sides = dict[str, tuple[np.ndarray, np.ndarray]]

_SHOWN = 16


def balance(
    loads: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="JSON: a list for each layer of a number for each expert, or what generate --moe-stats --json prints.",
        ),
    ],
    slots: Annotated[int, typer.Option(help="Experts that all devices have room for; those left over are copies.")],
    devices: Annotated[int, typer.Option(help="Devices that the slots are split over.")],
    groups: Annotated[
        int | None, typer.Option(help="Groups of consecutive experts, each kept on one node: hierarchical.")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(help="Nodes of consecutive devices; they divide the groups evenly.")
    ] = None,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the loads, layer by device.")] = None,
    json: Json = False,
) -> None:
    """Copy hot experts and place them on devices.

    Global, or hierarchical with --groups and --nodes. Before it, experts are dealt out in order, each once, one more to
    the first devices where they do not divide. No device is needed.
    """
    from jaxpar.errors import PlanError
    from jaxpar.moe.balance import in_order, over_mean, place
    from jaxpar.moe.loads import read_loads

    given = read_loads(loads)
    head = f"{counted(given.shape[1], 'expert')} on {counted(slots, 'slot')} of {counted(devices, 'device')}"
    if groups is None and nodes is None:
        policy, placement = "global", place(given, slots, devices)
    elif groups is not None and nodes is not None:
        policy, placement = "hierarchical", place(given, slots, devices, groups, nodes)
        head += f", {counted(groups, 'group')} on {counted(nodes, 'node')}"
    else:
        raise PlanError("--groups and --nodes make the policy hierarchical together: give both, or neither for global")
    head += f": {policy}"
    before, after = in_order(given, devices), placement.device_loads
    if png is not None:
        from jaxpar.moe.heat_map import draw

        draw(png, head, before, after)
    sides = {"before": (before, over_mean(before).max(axis=1)), "after": (after, over_mean(after).max(axis=1))}
    if json:
        asked = {"slots": slots, "devices": devices, "groups": groups, "nodes": nodes, "policy": policy}
        print_json({**asked, "layers": _document(placement, sides), **({"png": str(png)} if png else {})})
        return
    OUT.print(f"{head}\n\nLoad of each device, before (experts in order, no copies) and after\n")
    OUT.print(_load_table(sides))
    OUT.print("\nExperts that have copies, and how many slots each\n")
    for layer, copies in enumerate(placement.copies):
        OUT.print(f"layer {layer}: {_copies(copies)}")
    worst = ", ".join(f"{largest.max():.3f} {name}" for name, (_, largest) in sides.items())
    OUT.print(f"\nmax/mean of the worst layer: {worst}")
    if png is not None:
        OUT.print(f"\n{png} shows the loads", markup=False)


def _document(placement: Placement, sides: _Sides) -> list[dict[str, Any]]:
    return [
        {
            "layer": layer,
            "mean": float(placement.device_loads[layer].mean()),
            **{
                name: {"loads": loads[layer].tolist(), "largest_over_mean": float(largest[layer])}
                for name, (loads, largest) in sides.items()
            },
            "copies": copies.tolist(),
            "slots": placement.slots[layer].tolist(),
        }
        for layer, copies in enumerate(placement.copies)
    ]


def _load_table(sides: _Sides) -> Table:
    """A row before and one after for each layer; of many devices the middle is left out."""
    layers, devices = sides["after"][0].shape
    rows = [
        (layer if name == "before" else "", name, *cut([*map(_figure, loads[layer])], _SHOWN), f"{largest[layer]:.3f}")
        for layer in range(layers)
        for name, (loads, largest) in sides.items()
    ]
    names = cut([f"device {device}" for device in range(devices)], _SHOWN)
    return table("", ("layer", "", *names, "max/mean"), rows, left=2)


def _copies(copies: np.ndarray) -> str:
    shown = [f"{expert} x{count}" for expert, count in enumerate(copies) if count > 1]
    return ", ".join(cut(shown, _SHOWN)) or "-"


def _figure(load: float) -> str:
    return f"{load:.0f}" if 1e6 <= load < 1e15 else f"{load:.6g}"
