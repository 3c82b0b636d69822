"""Key-value data of a model file, each value checked as it is taken."""

from __future__ import annotations

import math
import reprlib
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar, overload

from jaxpar.errors import CheckpointError

T = TypeVar("T")
_REQUIRED: Any = object()

MAX_INTEGER = 2**31 - 1
"""Positions, ids and sizes are int32 on devices."""


class Fields:
    """The values of one JSON object or GGUF header, with the name of the file for error messages.

    A null counts as absent, as in transformers. Every method raises a CheckpointError that names the file, the key,
    the value and what was expected, if the value is missing and has no default, is of another type (a bool is no
    number, 1.0 is no integer) or is out of bounds.
    """

    def __init__(self, values: Mapping[str, Any], file: Path, prefix: str = "") -> None:
        self.values = values
        self.file = file
        self.prefix = prefix

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def error(self, key: str, expected: str) -> CheckpointError:
        """The error to raise for the value of `key`."""
        if key not in self.values:
            return CheckpointError(f"{self.file}: {self.prefix}{key} is missing, expected {expected}")
        found = reprlib.repr(self.values[key])
        return CheckpointError(f"{self.file}: {self.prefix}{key} is {found}, expected {expected}")

    @overload
    def integer(self, key: str, *, minimum: int = ..., maximum: int = ...) -> int: ...
    @overload
    def integer(self, key: str, default: T, *, minimum: int = ..., maximum: int = ...) -> int | T: ...
    def integer(self, key: str, default: Any = _REQUIRED, *, minimum: int = 1, maximum: int = MAX_INTEGER) -> Any:
        """An integer in [minimum, maximum]."""
        value = self.values.get(key)
        if value is None and default is not _REQUIRED:
            return default
        if type(value) is not int or not minimum <= value <= maximum:
            raise self.error(key, f"an integer from {minimum} to {maximum}")
        return value

    @overload
    def number(self, key: str, *, minimum: float = ..., above: float = ...) -> float: ...
    @overload
    def number(self, key: str, default: T, *, minimum: float = ..., above: float = ...) -> float | T: ...
    def number(
        self, key: str, default: Any = _REQUIRED, *, minimum: float = -math.inf, above: float = -math.inf
    ) -> Any:
        """A finite number, at least `minimum` and greater than `above`."""
        value: Any = self.values.get(key)
        if value is None and default is not _REQUIRED:
            return default
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not (minimum <= value <= sys.float_info.max and value > above):
            bound = f" >= {minimum:g}" if minimum > -math.inf else f" > {above:g}" if above > -math.inf else ""
            raise self.error(key, f"a finite number{bound}")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.values.get(key)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.error(key, "true or false")
        return value

    @overload
    def choice(self, key: str, choices: Collection[str]) -> str: ...
    @overload
    def choice(self, key: str, choices: Collection[str], default: T) -> str | T: ...
    def choice(self, key: str, choices: Collection[str], default: Any = _REQUIRED) -> Any:
        """One of the strings `choices`."""
        value = self.values.get(key)
        if value is None and default is not _REQUIRED:
            return default
        if type(value) is not str or value not in choices:
            raise self.error(key, f"one of {', '.join(choices)}" if len(choices) > 1 else f"{', '.join(choices)}")
        return value

    def string(self, key: str, default: T) -> str | T:
        """A string."""
        value = self.values.get(key)
        if value is None:
            return default
        if type(value) is not str:
            raise self.error(key, "a string")
        return value

    def items(self, key: str, kind: type[T]) -> list[T] | None:
        """A list of which every item is exactly of type `kind`, or None where it is absent."""
        value = self.values.get(key)
        if value is None:
            return None
        if type(value) is not list or any(type(item) is not kind for item in value):
            raise self.error(key, f"a list of {kind.__name__}")
        return value

    def section(self, key: str) -> Fields | None:
        """The object under `key`, or None where it is absent."""
        value = self.values.get(key)
        if value is None:
            return None
        if type(value) is not dict:
            raise self.error(key, "an object")
        return Fields(value, self.file, f"{self.prefix}{key}.")
