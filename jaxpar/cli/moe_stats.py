"""Statistics of experts as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Group
from rich.table import Table

from jaxpar.cli.output import table
from jaxpar.moe.balance import over_mean
from jaxpar.tables import counted, cut

if TYPE_CHECKING:
    from jaxpar.moe.stats import ExpertStats

_SHOWN = 16


def render(stats: ExpertStats) -> Group:
    """Tokens of each expert and of each rank, the hottest experts and how they change, and what dispatch takes."""
    from jaxpar.moe.stats import hottest

    rows = [
        (layer, f"{loads.mean():.4g}", *(_names(hottest(part)) for part in (loads, *stats.halves[:, layer])), drift)
        for layer, (loads, drift) in enumerate(
            zip(stats.loads, ("-" if np.isnan(d) else f"{d:.3f}" for d in stats.drift), strict=True)
        )
    ]
    columns = ("layer", "tokens an expert", "hottest", "first half", "second half", "drift")
    return Group(
        _loads(f"Tokens of each expert in {counted(stats.steps, stats.unit)}", "expert", stats.loads),
        "",
        _loads("Tokens of each rank, copies sharing evenly", "rank", stats.rank_loads),
        "",
        table("Hottest experts", columns, rows),
        "",
        *_remarks(stats),
    )


def _loads(title: str, what: str, loads: np.ndarray) -> Table:
    """A row for each layer; of many columns the middle is left out."""
    largest = over_mean(loads.astype(float)).max(axis=1)
    rows = [
        (layer, *cut([f"{load:.6g}" for load in row], _SHOWN), f"{largest[layer]:.3f}")
        for layer, row in enumerate(loads)
    ]
    names = cut([f"{what} {number}" for number in range(loads.shape[1])], _SHOWN)
    return table(title, ("layer", *names, "max/mean"), rows)


def _remarks(stats: ExpertStats) -> list[str]:
    lines = [f"{counted(stats.dropped, 'row')} dropped on the way to experts"]
    if stats.stages > 1:
        lines.append(
            f"A token's layers fall into {counted(stats.stages, 'tick')}: of tokens under way in the middle, the first "
            "half of the ticks has the layers of the first stages, and the second half the others"
        )
    if stats.time is not None:
        lines.append(
            f"Of the mean device's time {stats.time.dispatch:.1%} is dispatch to experts, {stats.time.experts:.1%} the "
            "experts themselves"
        )
    return lines


def _names(experts: Sequence[int]) -> str:
    return " ".join(map(str, experts)) or "-"
