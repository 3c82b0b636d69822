"""What the benchmarks share: turns taken side by side, ratios with their spread, tables, JSON and pictures."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxpar.tables import table

Turn = Callable[[], float]
"""Does the work once and returns the seconds that it took."""

RESULTS = Path(__file__).parent / "results"
"""Where benchmarks write unless told otherwise."""
_COLORS = ("#2c5f8a", "#d98c3f", "#7a9e4f", "#8c5a8c", "#999999")


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of some rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of one value a round."""
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        """`1.53 (1.48-1.60)`."""
        return f"{figure(self.median)} ({figure(self.low)}-{figure(self.high)})"

    def to_json(self) -> dict[str, float]:
        """The three numbers, to five significant digits."""
        return {name: float(f"{getattr(self, name):.5g}") for name in ("median", "low", "high")}


def figure(value: float) -> str:
    """Three significant digits, or all of those before the point."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def interleave(turns: Mapping[str, Turn], rounds: int, warm_up: int = 1) -> dict[str, list[float]]:
    """Let everyone take a turn in every round -> seconds of each one's turns, round by round.

    A machine that slows down then slows all of them down. Every second round runs in reverse, so that nobody gains by
    whom it follows. The `warm_up` rounds before compile programs and fill caches; they are not counted.
    """
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(-warm_up, rounds):
        for name in list(turns)[:: 1 if number % 2 == 0 else -1]:
            taken = turns[name]()
            if number >= 0:
                seconds[name].append(taken)
    return seconds


def ratios(above: Sequence[float], below: Sequence[float]) -> Spread:
    """`above` over `below`, taken within each round."""
    return Spread.of([a / b for a, b in zip(above, below, strict=True)])


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def use_one_core() -> None:
    """Pin this process to its last core, where that can be done: times are then those of all ranks' work together.

    To be called before JAX starts. On more cores faked devices run beside one another, and one device alone does not.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def machine() -> dict[str, Any]:
    """What a reader needs to judge absolute figures by."""
    return {"cpu": _cpu_model(), "cores": cores(), "python": platform.python_version(), "jax": version("jax")}


def warn_if_busy() -> None:
    """Say so when other processes use the cores, before any of our own work does: it makes figures worthless.

    Thread pools that spin at barriers, torch's more than XLA's, then wait for a thread that has no core to run on.
    """
    used = _busy_seconds(), time.perf_counter()
    time.sleep(1)
    busy = (_busy_seconds() - used[0]) / (time.perf_counter() - used[1])
    if busy > 0.1:
        print(
            f"warning: other processes use {busy:.1f} of {cores()} cores; run this on a quiet machine", file=sys.stderr
        )


def _busy_seconds() -> float:
    """Core seconds that all processes have used since the machine started; 0 where no /proc tells it."""
    try:
        user, nice, system = Path("/proc/stat").read_text(encoding="utf-8").split(maxsplit=4)[1:4]
    except OSError:
        return 0.0
    return (int(user) + int(nice) + int(system)) / os.sysconf("SC_CLK_TCK")


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def arguments(description: str, rounds: int) -> argparse.ArgumentParser:
    """A command line with what all benchmarks take."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds, help="turns that everyone takes")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON and the picture")
    return parser


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], left: int = 1) -> None:
    """Print a table; it keeps its columns in a narrow window and in a pipe."""
    console = Console(highlight=False, soft_wrap=True, width=max(200, Console().width))
    console.print(table(title, columns, rows, left))


def write(folder: Path, name: str, document: Mapping[str, Any]) -> None:
    """Write `name`.json: the machine, then what was measured on it."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"benchmark": name, "machine": machine(), **document}, indent=1)
    (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def draw_bars(
    path: Path,
    title: str,
    quantity: str,
    labels: Sequence[str],
    series: Mapping[str, Sequence[Spread]],
    parity: bool = False,
    log: bool = False,
) -> None:
    """Draw grouped bars of medians, each with a line from the smallest to the largest round; `parity`: and one at 1.

    `log`: the quantity on a logarithmic axis.
    """
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(max(6.0, 0.6 * len(labels) * len(series) + 2), 3.8), layout="constrained")
    axes = drawing.subplots()
    width = 0.8 / len(series)
    for place, (name, spreads) in enumerate(series.items()):
        middles = [spread.median for spread in spreads]
        below = [spread.median - spread.low for spread in spreads]
        above = [spread.high - spread.median for spread in spreads]
        at = [group + (place - (len(series) - 1) / 2) * width for group in range(len(labels))]
        bars = axes.bar(at, middles, 0.92 * width, yerr=(below, above), label=name, color=_COLORS[place], ecolor="#444")
        axes.bar_label(bars, [figure(middle) for middle in middles], padding=2, fontsize=7)
    if parity:
        axes.axhline(1, color="#444", linewidth=0.8, linestyle="--")
    if log:
        axes.set_yscale("log")
    axes.set_xticks(range(len(labels)), labels, fontsize=8)
    axes.set_ylabel(quantity)
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.margins(y=0.12)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, dpi=120)


def draw_lines(
    path: Path, title: str, across: str, quantity: str, lines: Mapping[str, Sequence[tuple[float, Spread]]]
) -> None:
    """Draw medians against a quantity that doubles, on logarithmic axes, with a line at 1."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(7.5, 3.8), layout="constrained")
    axes = drawing.subplots()
    for place, (name, points) in enumerate(lines.items()):
        at, spreads = zip(*points, strict=True)
        color, style = _COLORS[place % len(_COLORS)], "-" if place < len(_COLORS) else "--"
        axes.plot(at, [spread.median for spread in spreads], style, marker="o", markersize=4, color=color, label=name)
        axes.fill_between(
            at, [spread.low for spread in spreads], [spread.high for spread in spreads], color=color, alpha=0.12
        )
    axes.axhline(1, color="#444", linewidth=0.8, linestyle="--")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    ticks = sorted({at for points in lines.values() for at, _ in points})
    axes.set_xticks(ticks, [f"{tick:.0f}" for tick in ticks])
    axes.yaxis.set_major_formatter(lambda value, _: figure(value))
    axes.set_xlabel(across)
    axes.set_ylabel(quantity)
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, dpi=120)
