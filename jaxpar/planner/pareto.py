"""The Pareto front: plans of which no other gives both more tokens a second per device and more per user."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from jaxpar.pictures import require_matplotlib, save
from jaxpar.planner.estimate import Estimate

if TYPE_CHECKING:
    from collections.abc import Mapping


def front(estimates: Iterable[Estimate]) -> list[Estimate]:
    """Those that nothing beats in both, from the fastest for a user to the most for a device."""
    best: list[Estimate] = []
    for one in sorted(estimates, key=lambda one: (-one.tokens_per_user, -one.tokens_per_device)):
        if not best or one.tokens_per_device > best[-1].tokens_per_device:
            best.append(one)
    return best


def draw(path: Path, title: str, found: Mapping[str, Iterable[Estimate]], chosen: Estimate | None) -> None:
    """Draw the front of each named set of plans, with every plan as a dot, as a PNG.

    Raises:
        JaxparError: matplotlib is missing, or the file cannot be written.
    """
    require_matplotlib(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for index, (name, estimates) in enumerate(found.items()):
        all_of_them = list(estimates)
        colour = f"C{index}"
        axes.scatter(*_points(all_of_them), s=6, alpha=0.25, color=colour, linewidths=0)
        axes.plot(*_points(front(all_of_them)), marker="o", markersize=4, color=colour, label=name)
    if chosen is not None:
        axes.scatter(*_points([chosen]), marker="*", s=220, color="black", zorder=3, label="the best plan")
    axes.set(xlabel="tokens/s per user", ylabel="tokens/s per device", title=title, xscale="log")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    save(figure, path)


def _points(estimates: Iterable[Estimate]) -> tuple[list[float], list[float]]:
    every = list(estimates)
    return [one.tokens_per_user for one in every], [one.tokens_per_device for one in every]
