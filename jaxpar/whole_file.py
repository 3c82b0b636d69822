"""A file that is whole or not there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Give a path beside `path` to write to, and put what is there in its place when the block ends.

    If the block raises (Ctrl-C, too), an older file stays and nothing is left behind. Raises OSError where it cannot.
    """
    part = path.with_name(f".unfinished-{path.name}")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
