"""How commands speak: tables and prose on a terminal, JSON on request, nothing decorative into a pipe."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from jaxpar.tables import human_bytes, table

__all__ = ["ERR", "OUT", "human_bytes", "print_json", "table"]

# Tables keep their columns in a pipe and in a narrow window: lines wrap there rather than lose figures.
_WIDTH = max(120, Console().width)
OUT = Console(highlight=False, soft_wrap=True, width=_WIDTH)
ERR = Console(stderr=True, highlight=False, soft_wrap=True)


def print_json(document: Mapping[str, Any] | Sequence[Any]) -> None:
    """One JSON document on standard output."""
    json.dump(document, sys.stdout, indent=2, ensure_ascii=False)
    sys.stdout.write("\n")
