"""`jaxpar layout`: which positions each rank of cp holds, and what causal attention costs it."""

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

# What is counted within seconds.
_MAX_RANKS, _MAX_LENGTH = 256, 1 << 20
_RUNS_SHOWN, _STEPS_SHOWN = 6, 16


def layout(
    name: Annotated[str, typer.Argument(metavar="LAYOUT", help="contiguous, zigzag or striped.")],
    cp: Annotated[int, typer.Option(help="Ranks that the positions are dealt over.")],
    length: Annotated[int, typer.Option(help="Tokens of the sequence.")],
    cp_interleave: Annotated[int, typer.Option(help="Positions that follow one another on a rank, of striped.")] = 1,
    window: Annotated[
        int | None, typer.Option(help="Sliding attention: keys that a query sees, its own among them.")
    ] = None,
    png: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the mask of every ring step, coloured by rank.")
    ] = None,
    json: Json = False,
) -> None:
    """Print who holds which positions, and the causal work.

    At ring step s rank r has the keys of rank r - s. No device is needed.
    """
    from jaxpar.errors import PlanError
    from jaxpar.layout import causal_work, deal

    bounds = [
        ("--cp", cp, _MAX_RANKS),
        ("--length", length, _MAX_LENGTH),
        ("--cp-interleave", cp_interleave, _MAX_LENGTH),
    ]
    for option, value, most in [*bounds, *([] if window is None else [("--window", window, _MAX_LENGTH)])]:
        if not 1 <= value <= most:
            raise PlanError(f"{option} {value}: it must be from 1 to {most}")
    held = deal(name, 0, length, cp, cp_interleave)
    if cp_interleave > 1 and name != "striped":
        raise PlanError(f"--cp-interleave {cp_interleave}: {name} has no stripes; leave it out, or use striped")
    head = f"{name}: {counted(length, 'token')} over {counted(cp, 'rank')}"
    head += f", in stripes of {cp_interleave}" if cp_interleave > 1 else ""
    head += f", a window of {window}" if window is not None else ""
    if png is not None:
        from jaxpar.layout_picture import draw

        draw(png, head, held, window)
    work = causal_work(held, window)
    if json:
        of_layout = {"layout": name, "cp": cp, "length": length, "cp_interleave": cp_interleave, "window": window}
        print_json({**of_layout, **_document(held, work), **({"png": str(png)} if png else {})})
        return
    padded = max(map(len, held))
    rows = [(rank, _runs(mine), len(mine), padded - len(mine)) for rank, mine in enumerate(held)]
    OUT.print(f"{head}\n")
    OUT.print(table("", ("rank", "positions", "tokens", "padding"), rows, left=2))
    OUT.print("\nPairs of a query and a key that it sees, at each ring step\n")
    OUT.print(_work_table(work))
    OUT.print(_balance(work))
    if png is not None:
        OUT.print(f"\n{png} shows them", markup=False)


def _document(held: list[np.ndarray], work: np.ndarray) -> dict[str, Any]:
    padded = max(map(len, held))
    ranks = [
        {
            "rank": rank,
            "positions": mine.tolist(),
            "tokens": len(mine),
            "padding": padded - len(mine),
            "work": steps.tolist(),
        }
        for rank, (mine, steps) in enumerate(zip(held, work, strict=True))
    ]
    mean, largest, lock_step = _costs(work)
    return {
        "ranks": ranks,
        "work": {
            "total": int(work.sum()),
            "mean": mean,
            "largest": largest,
            "largest_over_mean": largest / mean,
            "slowest_of_each_step": work.max(axis=0).tolist(),
            "lock_step": lock_step,
            "lock_step_over_mean": lock_step / mean,
        },
    }


def _costs(work: np.ndarray) -> tuple[float, int, int]:
    """Pairs of a rank in the mean, of the slowest rank, and of the slowest rank of each ring step together."""
    return float(work.sum() / len(work)), int(work.sum(axis=1).max()), int(work.max(axis=0).sum())


def _work_table(work: np.ndarray) -> Table:
    """Ranks against ring steps, of which the middle is left out where they are many."""
    steps = [f"step {step}" for step in range(len(work))]
    named = [*zip(range(len(work)), work, strict=True), ("slowest", work.max(axis=0))]
    rows = [(name, *cut([str(pairs) for pairs in row], _STEPS_SHOWN), row.sum()) for name, row in named]
    return table("", ("rank", *cut(steps, _STEPS_SHOWN), "all steps"), rows)


def _balance(work: np.ndarray) -> str:
    mean, largest, lock_step = _costs(work)
    return (
        f"\n{counted(int(work.sum()), 'pair')}, {f'{mean:.2f}'.removesuffix('.00')} a rank in the mean"
        f"\nthe slowest rank: {largest}, {largest / mean:.5f} times the mean"
        f"\nin lock-step, the slowest rank of each ring step: {lock_step}, {lock_step / mean:.5f} times the mean"
    )


def _runs(positions: np.ndarray) -> str:
    """Positions in ascending order as runs: "0-3, 28-31"; of many the first ones and the last."""
    import numpy as np

    if not len(positions):
        return "-"
    runs = np.split(positions, np.flatnonzero(np.diff(positions) > 1) + 1)
    return ", ".join(cut([str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs], _RUNS_SHOWN))
