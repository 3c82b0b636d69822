"""How commands speak: tables and prose on a terminal, JSON on request, nothing decorative into a pipe."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.status import Status
from rich.text import Text

from jaxpar.tables import human_bytes, table

__all__ = ["ERR", "OUT", "Progress", "human_bytes", "print_json", "progress", "table"]


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave a reader that went away to `main`; rich would exit with status 1, which says that a check failed."""
        raise BrokenPipeError


# Tables keep their columns in a pipe and in a narrow window: lines wrap there rather than lose figures.
_WIDTH = max(200, Console().width)
OUT = _Console(highlight=False, soft_wrap=True, width=_WIDTH)
ERR = _Console(stderr=True, highlight=False, soft_wrap=True, width=None if sys.stderr.isatty() else _WIDTH)


def print_json(document: Mapping[str, Any] | Sequence[Any]) -> None:
    """One JSON document on standard output; a number that is not finite, for which JSON has no word, is null."""
    json.dump(_finite(document), sys.stdout, indent=2, ensure_ascii=not _is_utf8(sys.stdout.encoding))
    sys.stdout.write("\n")


class Progress:
    """What is being done, shown on a terminal until it is stopped; silent where there is none."""

    def __init__(self, status: Status | None) -> None:
        self._status = status

    def say(self, text: str) -> None:
        """Show `text` instead."""
        if self._status is not None:
            self._status.update(Text(text))

    def stop(self) -> None:
        """Make room for output."""
        if self._status is not None:
            self._status.stop()


@contextmanager
def progress(text: str) -> Iterator[Progress]:
    """Show `text` beside a spinner on standard error while the block runs; in a pipe nothing."""
    if not ERR.is_terminal:
        yield Progress(None)
        return
    with ERR.status(Text(text), refresh_per_second=4) as status:
        yield Progress(status)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _is_utf8(encoding: str) -> bool:
    return encoding.lower().replace("-", "") == "utf8"
