"""The fits against what was measured, as a picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jaxpar.calibrate.result import Calibration
from jaxpar.pictures import save

_COLORS = ("#2c5f8a", "#d98c3f", "#7a9e4f", "#8c5a8c", "#999999", "#c0504d")


def draw(calibration: Calibration, path: Path) -> None:
    """A panel for each collective: points are medians, lines the fits, a color for each size of groups."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(sample.collective for sample in calibration.samples))
    groups = list(dict.fromkeys((sample.ranks, sample.level) for sample in calibration.samples))
    drawing = Figure(figsize=(3.4 * max(len(names), 1), 3.4), layout="constrained")
    panels = drawing.subplots(1, max(len(names), 1), sharey=True, squeeze=False)[0]
    for panel, name in zip(panels, names, strict=False):
        for sample in calibration.samples:
            if sample.collective != name:
                continue
            color = _COLORS[groups.index((sample.ranks, sample.level)) % len(_COLORS)]
            x = np.geomspace(sample.sizes[0], sample.sizes[-1], 100)
            fitted = [1e6 * sample.fit.seconds(size, sample.ranks) for size in x]
            label = f"{sample.ranks} ranks {sample.level}, off {sample.fit.error:.0%}"
            panel.plot(x, fitted, color=color, linewidth=1, label=label)
            panel.plot(sample.sizes, [1e6 * taken for taken in sample.seconds], "o", color=color, markersize=4)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_title(name, loc="left", fontsize=10)
        panel.set_xlabel("bytes of a rank's operand", fontsize=8)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.3)
        panel.legend(frameon=False, fontsize=7)
    panels[0].set_ylabel("microseconds of a call")
    save(drawing, path)
