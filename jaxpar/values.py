"""Values as users give them: taken as numbers, and shown in one line of a message."""

from __future__ import annotations

import operator
import reprlib
from numbers import Real

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 60


def whole_number(value: object) -> int | None:
    """`value` as an int, whichever integer type it has (numpy's, too); None for anything else, bools included."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]  # that is what is being asked
    except TypeError:
        return None


def real_number(value: object) -> float | None:
    """`value` as a float, whichever type of number it is (numpy's, too); None for anything else, bools included."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def shown(value: object) -> str:
    """`value` for a message: its repr on one line, cut where it is long."""
    return " ".join(_REPR.repr(value).split())
