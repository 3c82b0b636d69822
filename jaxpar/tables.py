"""Plain tables and units, the same in every report."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], left: int = 1) -> Table:
    """A plain table: the first `left` columns flush left, figures flush right."""
    drawn = Table(title=title or None, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        drawn.add_column(column, justify="left" if index < left else "right", no_wrap=True)
    for row in rows:
        drawn.add_row(*map(str, row))
    return drawn


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    """A table in Markdown, whose first `left` columns are text and the others numbers."""
    rules = ["---" if place < left else "---:" for place in range(len(columns))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (columns, rules, *rows))


def counted(number: int, noun: str) -> str:
    """A number of things: 1 step, 2 steps."""
    return f"{number} {noun}{'s' * (number != 1)}"


def cut(items: Sequence[str], most: int) -> list[str]:
    """The items; where there are more than `most`, the first half of that, "..." and the last."""
    return [*items] if len(items) <= most else [*items[: most // 2], "...", items[-1]]


def human_bytes(count: float) -> str:
    """Bytes with a binary unit and three significant digits: 1048576 -> '1 MiB'."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.4g} {unit}"
        count /= 1024
    raise AssertionError("unreachable")
