"""A layout as a picture: which rank computes which pairs of a query and a key, ring step by ring step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jaxpar.errors import PlanError
from jaxpar.pictures import require_matplotlib, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_LENGTH, MAX_RANKS = 512, 16
"""What a picture has room for: a pair is a square of whole pixels, and ranks have colours to tell apart."""

UNSEEN, ANOTHER_STEP = -1, -2

_DPI = 100
_PANEL, _GAP, _TOP, _BOTTOM, _LEFT, _LEAST_WIDTH = 256, 64, 116, 60, 64, 640  # pixels; a panel has so many or more
_PANELS_A_ROW = 4
# Of matplotlib's tab20, whose even entries are dark and odd ones light; without its greys.
_COLOURS = (0, 2, 4, 6, 8, 10, 12, 16, 18, 1, 3, 5, 7, 9, 11, 13, 17, 19)
_GREY, _WHITE = (228, 228, 228), (255, 255, 255)


def ring_steps(held: list[np.ndarray], window: int | None = None) -> np.ndarray:
    """The rank that computes each pair at each ring step [ranks, queries, keys], else ANOTHER_STEP or UNSEEN.

    `held` are the positions of each rank, in all 0 to S-1; steps and `window` are those of `causal_work`.
    """
    ranks, length = len(held), sum(map(len, held))
    owner = np.empty(length, np.int64)
    for rank, positions in enumerate(held):
        owner[positions] = rank
    distance = np.arange(length)[:, None] - np.arange(length)
    seen = (distance >= 0) & (distance < (length if window is None else window))
    at_step = (owner[:, None] - owner) % ranks
    computed = np.where(at_step == np.arange(ranks)[:, None, None], owner[:, None], ANOTHER_STEP)
    return np.where(seen, computed, UNSEEN)


def draw(path: Path, title: str, held: list[np.ndarray], window: int | None = None) -> None:
    """Write a PNG with a panel for each ring step.

    Args:
        path: of the PNG; an older file is replaced only when the new one is whole.
        title: above the panels.
        held: the positions of each rank.
        window: of sliding attention.

    Raises:
        PlanError: more than MAX_LENGTH positions or MAX_RANKS ranks.
        JaxparError: matplotlib is not installed, or the file cannot be written.
    """
    ranks, length = len(held), sum(map(len, held))
    if length > MAX_LENGTH or ranks > MAX_RANKS:
        raise PlanError(
            f"{path}: {length} tokens over {ranks} ranks are too many to draw: "
            f"use at most {MAX_LENGTH} tokens and {MAX_RANKS} ranks"
        )
    require_matplotlib(path)
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    columns, side = min(ranks, _PANELS_A_ROW), length * -(-_PANEL // length)
    width = max(_LEFT + columns * (side + _GAP), _LEAST_WIDTH)
    height = _TOP + -(-ranks // columns) * (side + _GAP) - _GAP + _BOTTOM
    figure = Figure(figsize=(width / _DPI, height / _DPI), dpi=_DPI)
    colours = colormaps["tab20"](_COLOURS[:ranks], bytes=True)[:, :3]
    palette = np.concatenate([colours, [_GREY, _WHITE]]).astype(np.uint8)
    for step, computed in enumerate(ring_steps(held, window)):
        row, column = divmod(step, columns)
        left, bottom = _LEFT + column * (side + _GAP), height - _TOP - row * (side + _GAP) - side
        axes = figure.add_axes((left / width, bottom / height, side / width, side / height))
        axes.imshow(palette[computed], interpolation="nearest")
        work = np.bincount(computed[computed >= 0], minlength=ranks)
        least = f"{work.min()} to " if work.min() < work.max() else ""
        axes.set_title(f"step {step}: {least}{work.max()} pairs a rank", fontsize=9)
        _mark(axes, first=column == 0, last=step + columns >= ranks)
    names = [*(f"rank {rank}" for rank in range(ranks)), "another step"]
    at = _LEFT / width
    figure.suptitle(title, x=at, y=1 - 14 / height, ha="left", va="top", fontsize=11)
    figure.legend(
        handles=[Patch(color=f"#{rgb.tobytes().hex()}", label=name) for rgb, name in zip(palette, names, strict=False)],
        title="Each pair of a query and a key, coloured by the rank that computes it",
        alignment="left",
        loc="upper left",
        bbox_to_anchor=(at, 1 - 36 / height),
        borderpad=0,
        borderaxespad=0,
        ncols=9,
        frameon=False,
        fontsize=8,
        title_fontsize=8,
    )
    save(figure, path)


def _mark(axes: Axes, first: bool, last: bool) -> None:
    """A thin frame outside the pixels, ticks, and names beside the first of a row and below the last of a column."""
    from matplotlib.ticker import MaxNLocator

    axes.spines[:].set(position=("outward", 1), linewidth=0.5, color="#808080")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(8, steps=[1, 2, 4, 5, 8, 10], integer=True))
        axis.set_tick_params(labelsize=7, length=2)
    if first:
        axes.set_ylabel("position of the query", fontsize=8)
    if last:
        axes.set_xlabel("position of the key", fontsize=8)
