"""The wire format of protocol buffers: a message is a sequence of (field number and wire type, value).

A value is given as its bytes, without the length before it; one that does not parse raises ValueError or IndexError.
"""

from __future__ import annotations

from collections.abc import Iterator


def every(message: memoryview, number: int) -> list[memoryview]:
    """The values of a field that may be repeated."""
    return [value for field, value in _fields(message) if field == number]


def first(message: memoryview, number: int) -> memoryview:
    """The field's value, empty where it is absent."""
    return next((value for field, value in _fields(message) if field == number), message[:0])


def text(message: memoryview, number: int) -> str:
    """The field's value as UTF-8, empty where it is absent."""
    return bytes(first(message, number)).decode()


def integers(message: memoryview, number: int) -> list[int]:
    """The numbers of a field: one, or several that are packed; none where it is absent."""
    packed = first(message, number)
    values, at = [], 0
    while at < len(packed):
        value, at = _varint(packed, at)
        values.append(value)
    return values


def integer(message: memoryview, number: int) -> int:
    """The field's number, 0 where it is absent."""
    return next(iter(integers(message, number)), 0)


def _fields(message: memoryview) -> Iterator[tuple[int, memoryview]]:
    """(number, value) of every field, in the order in which they stand."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        start = at
        match key & 7:
            case 0:
                _, at = _varint(message, at)
            case 1:
                at += 8
            case 2:
                size, start = _varint(message, at)
                at = start + size
            case 5:
                at += 4
            case kind:
                raise ValueError(f"wire type {kind} at byte {start}")
        yield key >> 3, message[start:at]


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """The number that begins at byte `at`, and where it ends."""
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
