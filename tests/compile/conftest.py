"""Tests that ask accelerators' compilers, each in a package of its own: `make test-compile` installs and runs them."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies here, so that `make test` leaves it out; a missing compiler fails it, and skips nothing."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.compile)
