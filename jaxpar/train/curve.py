"""The loss of a run as JSON and, where matplotlib is installed (the extra `plot`), as a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def write_curve(
    folder: Path, losses: Sequence[float], validation: Sequence[tuple[int, float]], summary: Mapping[str, Any]
) -> None:
    """Write `loss.json` and, if it can be drawn, `loss.png`.

    Args:
        folder: to write into.
        losses: of steps 1, 2, ..., in nats a token.
        validation: (steps done, loss) of every time that it was taken.
        summary: what else `loss.json` says of the run.
    """
    points = [{"step": step, "loss": round(loss, 5)} for step, loss in validation]
    document = {**summary, "validation": points, "training": [round(loss, 5) for loss in losses]}
    (folder / "loss.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if can_draw():
        _draw(folder / "loss.png", losses, validation)


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def _draw(path: Path, losses: Sequence[float], validation: Sequence[tuple[int, float]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses, color="#9bb7d4", linewidth=0.8, label="training, each batch")
    axes.plot(*zip(*validation, strict=True), color="#b03a2e", marker="o", markersize=3, label="validation")
    axes.set(xlabel="step", ylabel="loss (nats a token)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
