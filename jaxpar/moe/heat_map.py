"""Loads as a picture: a row for each layer, a column for each device, before and after balancing."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jaxpar.errors import PlanError
from jaxpar.moe.balance import over_mean
from jaxpar.pictures import require_matplotlib, save

MAX_DEVICES = 512
"""What a picture has room for: a load is a rectangle of whole pixels."""

_DPI = 100
_WIDE, _HIGH = 384, 320  # pixels of a panel, or so many more or fewer as whole ones take
_LEFT, _TOP, _GAP, _BOTTOM, _RIGHT, _BAR = 64, 72, 48, 56, 64, 14


def draw(path: Path, title: str, before: np.ndarray, after: np.ndarray) -> None:
    """Write a PNG with a panel for each: white is a layer's mean, red more, blue less.

    Args:
        path: of the PNG; an older file is replaced only when the new one is whole.
        title: above the panels.
        before: load of each device [layers, devices].
        after: the same, balanced.

    Raises:
        PlanError: more than MAX_DEVICES devices.
        JaxparError: matplotlib is not installed, or the file cannot be written.
    """
    layers, devices = before.shape
    if devices > MAX_DEVICES:
        raise PlanError(f"{path}: {devices} devices are too many to draw: use at most {MAX_DEVICES}")
    require_matplotlib(path)
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    wide = devices * max(1, _WIDE // devices)
    row = min(48, max(2, _HIGH // layers))
    high = layers * row
    width, height = _LEFT + 2 * (wide + _GAP) + _BAR + _RIGHT, _TOP + high + _BOTTOM
    figure = Figure(figsize=(width / _DPI, height / _DPI), dpi=_DPI)
    panels = {"before": over_mean(before), "after": over_mean(after)}
    # From no load to twice the mean or more, the same for both.
    scale = TwoSlopeNorm(vmin=0, vcenter=1, vmax=max(2, *(share.max() for share in panels.values())))
    colours = ScalarMappable(scale, colormaps["RdBu_r"])
    left = _LEFT
    for name, share in panels.items():
        axes = figure.add_axes((left / width, _BOTTOM / height, wide / width, high / height))
        axes.imshow(colours.to_rgba(share, bytes=True), interpolation="nearest", aspect="auto")
        axes.set_title(f"{name}: up to {share.max():.2f} times the mean", fontsize=9)
        axes.spines[:].set(position=("outward", 1), linewidth=0.5, color="#808080")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(8, steps=[1, 2, 4, 5, 8, 10], integer=True))
            axis.set_tick_params(labelsize=7, length=2)
        axes.set_xlabel("device", fontsize=8)
        left += wide + _GAP
    figure.axes[0].set_ylabel("layer", fontsize=8)
    bar = figure.add_axes((left / width, _BOTTOM / height, _BAR / width, high / height))
    figure.colorbar(colours, cax=bar).ax.tick_params(labelsize=7, length=2)
    bar.set_title("load / mean", fontsize=8)
    figure.suptitle(title, x=_LEFT / width, y=1 - 14 / height, ha="left", va="top", fontsize=11)
    save(figure, path)
