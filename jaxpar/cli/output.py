"""How commands speak: tables and prose on a terminal, JSON on request, nothing decorative into a pipe."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

OUT = Console(highlight=False, soft_wrap=True)
ERR = Console(stderr=True, highlight=False, soft_wrap=True)


def print_json(document: Mapping[str, Any] | Sequence[Any]) -> None:
    """One JSON document on standard output."""
    json.dump(document, sys.stdout, indent=2, ensure_ascii=False)
    sys.stdout.write("\n")


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], left: int = 1) -> Table:
    """A plain table: the first `left` columns flush left, figures flush right."""
    drawn = Table(title=title or None, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        drawn.add_column(column, justify="left" if index < left else "right", no_wrap=True)
    for row in rows:
        drawn.add_row(*map(str, row))
    return drawn


def human_bytes(count: float) -> str:
    """Bytes with a binary unit and three significant digits: 1048576 -> '1 MiB'."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.4g} {unit}"
        count /= 1024
    raise AssertionError("unreachable")
