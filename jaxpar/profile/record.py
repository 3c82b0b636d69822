"""Recording a trace."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

from jaxpar.errors import JaxparError


@contextmanager
def profiled(directory: Path | None) -> Iterator[None]:
    """Record what the devices do inside the `with` block under `directory`; without a directory, do nothing.

    Starting a trace starts JAX's backend: fake the CPU devices before. Work still running at the end is cut off: wait
    for its results inside. The trace is written also when the block raises.

    Raises:
        JaxparError: the directory cannot be written, or another profile is being taken.
    """
    if directory is None:
        yield
        return
    check_writable(directory)
    options = jax.profiler.ProfileOptions()
    # Python's frames would be most of the trace, and recording them keeps the devices waiting.
    options.python_tracer_level = 0
    try:
        jax.profiler.start_trace(directory, profiler_options=options)
    except RuntimeError as error:
        raise JaxparError(f"{directory}: no profile was started: {_first_line(error)}") from error
    try:
        yield
    finally:
        try:
            jax.profiler.stop_trace()
        except RuntimeError as error:
            raise JaxparError(f"{directory}: the profile could not be written: {_first_line(error)}") from error


def check_writable(directory: Path) -> None:
    """Make the directory and try it; JAX finds out only when the work is done, and 0.10 then takes no profile again.

    Raises:
        JaxparError: it cannot be made or written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise JaxparError(
            f"profile directory {directory}: {error.strerror or error}; name one that can be written"
        ) from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
