"""Runs a command in this process, where JAX has started: `jaxpar <arguments>` with what it prints and its status."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from unittest.mock import patch

from jaxpar.cli import main


@dataclass(frozen=True)
class Result:
    """The exit status, and what was printed."""

    status: object
    out: str
    err: str


def run(*arguments: object) -> Result:
    """`jaxpar <arguments>` into pipes."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    with patch.object(sys, "argv", ["jaxpar", *map(str, arguments)]), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as done:
            status = done.code
    return Result(status, *(stream.buffer.getvalue().decode() for stream in (out, err)))
