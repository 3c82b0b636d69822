"""A timetable as a picture: a row for each stage, a bar for each item that it works on, grey where it is idle."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from jaxpar.errors import PlanError
from jaxpar.pictures import require_matplotlib, save
from jaxpar.pipeline.timetable import Schedule

MAX_ITEMS, MAX_STAGES = 512, 64
"""What a picture has room for: a bar is at least a pixel wide, and a row a few high."""

_DPI = 100
_WIDTH, _ROW, _LEFT, _RIGHT, _TOP, _TITLE, _AXIS = 900, 22, 64, 20, 44, 26, 44  # pixels
_NUMBERED = 40  # items that have their number in their bar


def draw(path: Path, title: str, panels: Mapping[str, Schedule], unit: str, groups: int = 0) -> None:
    """Write a PNG with a panel for each schedule, all on one scale of time.

    Args:
        path: of the PNG; an older file is replaced only when the new one is whole.
        title: above the panels.
        panels: schedules by their titles.
        unit: what the axis of time counts.
        groups: of decode, whose items are coloured and numbered by group; 0: each item has its own number.

    Raises:
        PlanError: more than MAX_ITEMS items or MAX_STAGES stages.
        JaxparError: matplotlib is not installed, or the file cannot be written.
    """
    items, stages = (max(sizes) for sizes in zip(*(one.costs.shape for one in panels.values()), strict=True))
    if items > MAX_ITEMS or stages > MAX_STAGES:
        raise PlanError(
            f"{path}: {items} items through {stages} stages are too many to draw: "
            f"use at most {MAX_ITEMS} items and {MAX_STAGES} stages"
        )
    require_matplotlib(path)
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    high = stages * _ROW
    height = _TOP + len(panels) * (_TITLE + high) + _AXIS
    figure = Figure(figsize=(_WIDTH / _DPI, height / _DPI), dpi=_DPI)
    longest = max(one.duration for one in panels.values())
    colours, numbers = colormaps["viridis"], groups or items
    top = _TOP
    for name, schedule in panels.items():
        top += _TITLE
        inner = (_WIDTH - _LEFT - _RIGHT) / _WIDTH
        axes = figure.add_axes((_LEFT / _WIDTH, 1 - (top + high) / height, inner, high / height))
        top += high
        axes.broken_barh([(0, schedule.duration)], (-0.5, stages), facecolors="#e4e4e4")
        for item, (starts, costs) in enumerate(zip(schedule.starts, schedule.costs, strict=True)):
            number = item % groups if groups else item
            shade = number / max(1, numbers - 1)
            for stage, (start, cost) in enumerate(zip(starts, costs, strict=True)):
                axes.broken_barh(
                    [(start, cost)], (stage - 0.46, 0.92), facecolors=colours(shade), edgecolors="white", linewidth=0.4
                )
                if len(schedule.costs) <= _NUMBERED:
                    ink = "black" if shade > 0.6 else "white"
                    axes.text(start + cost / 2, stage, str(number), ha="center", va="center", fontsize=6, color=ink)
        axes.set_xlim(0, longest)
        axes.set_ylim(stages - 0.5, -0.5)
        axes.set_title(name, fontsize=9, loc="left", pad=4)
        axes.set_ylabel("stage", fontsize=8)
        axes.yaxis.set_major_locator(MaxNLocator(8, integer=True))
        axes.spines[:].set(linewidth=0.5, color="#808080")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_tick_params(labelsize=7, length=2)
        if top + _AXIS < height:
            axes.set_xticklabels([])
    figure.axes[-1].set_xlabel(unit, fontsize=8)
    figure.suptitle(title, x=_LEFT / _WIDTH, y=1 - 12 / height, ha="left", va="top", fontsize=11)
    save(figure, path)
