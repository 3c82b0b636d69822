"""What every picture needs: matplotlib, which is an extra, and a file that is whole or not there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from jaxpar.errors import JaxparError
from jaxpar.whole_file import written_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def require_matplotlib(path: Path) -> None:
    """Refuse to draw `path`, with the remedy, where matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise JaxparError(f"{path}: pictures need matplotlib: pip install 'jaxpar[plot]'") from error


def check_picture(path: Path) -> None:
    """Refuse a path before what is to be drawn is computed.

    Raises:
        JaxparError: it is no file, or its folder is none.
    """
    try:
        if path.exists() and not path.is_file():
            raise JaxparError(f"{path} is not a file: name one that can be written")
        os.scandir(path.parent).close()
    except OSError as error:
        raise JaxparError(f"{path} cannot be written: {error.strerror or error}; name another file") from error


def save(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG; an older file is replaced only when the new one is whole.

    Raises:
        JaxparError: the file cannot be written.
    """
    check_picture(path)
    try:
        with written_whole(path) as part:
            figure.savefig(part, format="png")
    except OSError as error:
        raise JaxparError(f"{path} cannot be written: {error.strerror or error}; name another file") from error
