"""Every test sees eight faked CPU devices, and an array that is broadcast by accident is an error."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import pytest
from hypothesis import settings

# Most of a test is compiling: the same programs, of which LLVM makes slower code in half the time.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

# Compilation makes the first example slow, and a run that fails must fail again.
settings.register_profile("jaxpar", deadline=None, derandomize=True, database=None)
settings.load_profile("jaxpar")

_REPOSITORY = Path(__file__).parent.parent
_ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
_ENVIRONMENT["PYTHONPATH"] = str(_REPOSITORY)


@pytest.fixture
def fresh_python(tmp_path: Path) -> Callable[..., str]:
    """Run code in an interpreter of its own, where JAX has not started, from an empty folder; gives what it prints."""

    def run(code: str, **environment: str) -> str:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", code],
            cwd=tmp_path,
            env=_ENVIRONMENT | environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def unwritten_pages_are_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cache begins as NaN, so that a page which nobody wrote cannot be read without showing."""
    import jax.numpy as jnp
    import numpy as np

    from jaxpar.attention.cache import Cache
    from jaxpar.program import Programs

    empty = Programs.empty_cache

    def nan_cache(programs: Programs, pages: int) -> Cache:
        return jax.tree.map(fill, empty(programs, pages))

    def fill(x: jax.Array) -> jax.Array:
        return jax.device_put(np.full(x.shape, np.nan, x.dtype), x.sharding) if x.dtype != jnp.int32 else x

    monkeypatch.setattr(Programs, "empty_cache", nan_cache)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how far from a tie the tokens were that tests compared, so that "equal" is known to mean something."""
    margins = [
        (value, report.nodeid)
        for report in terminalreporter.getreports("passed")
        for name, value in report.user_properties
        if name == "margin"
    ]
    if margins:
        smallest, test = min(margins)
        terminalreporter.write_line(
            f"tokens compared in {len(margins)} tests; the smallest margin to a tie is {smallest:.3g} ({test})"
        )
