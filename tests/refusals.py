"""What a call is refused with, which is one line for a user to read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from jaxpar.errors import CheckpointError, JaxparError


def error_of(call: Callable[[], Any], kind: type[JaxparError] = CheckpointError) -> str:
    """The message of the error of this kind that `call` raises."""
    with pytest.raises(kind) as raised:
        call()
    assert "\n" not in str(raised.value)
    return str(raised.value)
