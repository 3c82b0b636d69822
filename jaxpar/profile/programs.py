"""The programs that a profile carries: for each operation by name, what it is and the scope it was written under.

A trace (an `XSpace` protocol buffer) stores the optimised HLO of every program that ran as serialized `HloProto`s in
its plane "/host:metadata", which `jax.profiler.ProfileData` does not show. Only a handful of fields are needed, so this
reads the wire format itself; the field numbers are those of tsl/profiler/protobuf/xplane.proto and
xla/service/hlo.proto, which may grow but never renumber.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_COLLECTIVES = frozenset(
    {
        "all-gather",
        "all-reduce",
        "all-to-all",
        "collective-broadcast",
        "collective-permute",
        "ragged-all-to-all",
        "reduce-scatter",
    }
)
_CONTROL_FLOW = frozenset({"while", "conditional", "call"})
# How instructions and kernels are called where the trace lacks the program: after HLO's operation, after JAX's
# primitive, after NCCL's kernel. The first that matches counts: an all-reduce-scatter is a reduce-scatter.
_NAMES = (
    ("ragged-all-to-all", r"ragged.all.to.all"),
    ("reduce-scatter", r"reduce.?scatter|psum_scatter"),
    ("all-reduce", r"all.?reduce|^psum|^pmax|^pmin"),
    ("all-gather", r"all.?gather"),
    ("all-to-all", r"all.?to.?all"),
    ("collective-permute", r"collective.permute|^ppermute|sendrecv"),
)


@dataclass(frozen=True)
class Operation:
    """`collective` is the kind ("all-reduce", ...) or None; `scope` the innermost "<sublayer>:<strategy>", or "".

    The time of control flow is that of the operations in it. `is_done` marks the second half of an asynchronous
    operation.
    """

    collective: str | None
    scope: str
    is_control_flow: bool = False
    is_done: bool = False


def programs(xspace: bytes) -> dict[str, dict[str, Operation]]:
    """{"jit_step(17)": {"all-reduce.3": Operation, ...}} of a serialized `XSpace`.

    Raises:
        ValueError, IndexError: the bytes are not one.
    """
    found = {}
    for number, plane in _fields(memoryview(xspace)):
        if number != 1 or _first(plane, 2) != b"/host:metadata":
            continue
        for entry in _all(plane, 4):
            metadata = _first(entry, 2)
            for stat in _all(metadata, 5):
                if hlo := _first(stat, 6):
                    found[bytes(_first(metadata, 2)).decode()] = _operations(_first(hlo, 1))
    return found


def guess(name: str) -> Operation:
    """What an operation does by its name alone: for programs that the trace lacks (jax-ml/jax issue 37533)."""
    lower = name.lower()
    kind = next((kind for kind, pattern in _NAMES if re.search(pattern, lower)), None)
    return Operation(kind, "", re.sub(r"[.\d]+$", "", lower) in _CONTROL_FLOW, "-done" in lower)


def scope_of(op_name: str) -> str:
    """The innermost "<sublayer>:<strategy>" of a path of named scopes; transformations may wrap it in parentheses."""
    return next(iter(re.findall(r"[A-Za-z_]\w*:[A-Za-z_]\w*", op_name)[::-1]), "")


def _operations(module: memoryview) -> dict[str, Operation]:
    computations = {_int(_first(c, 5)): _all(c, 2) for c in _all(module, 3)}
    instructions = {_int(_first(i, 35)): i for body in computations.values() for i in body}

    def collective(instruction: memoryview) -> str | None:
        opcode = bytes(_first(instruction, 2)).decode()
        base = opcode.removesuffix("-start").removesuffix("-done")
        if base in _COLLECTIVES:
            return base
        # A fused or asynchronous collective stands in the computation that is called; -done follows its -start.
        inner: list[memoryview] = []
        if opcode in ("fusion", "async-start"):
            inner = [i for c in _ints(_first(instruction, 38)) for i in computations[c]]
        elif opcode in ("async-update", "async-done"):
            inner = [instructions[_ints(_first(instruction, 36))[0]]]
        return next((kind for i in inner if (kind := collective(i))), None)

    operations = {}
    for instruction in instructions.values():
        opcode = bytes(_first(instruction, 2)).decode()
        op_name = bytes(_first(_first(instruction, 7), 2)).decode()
        operations[bytes(_first(instruction, 1)).decode()] = Operation(
            collective(instruction), scope_of(op_name), opcode in _CONTROL_FLOW, opcode.endswith("-done")
        )
    return operations


# --- protocol buffers: a message is a sequence of (field number and wire type, value) ---


def _fields(message: memoryview) -> Iterator[tuple[int, memoryview]]:
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
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def _all(message: memoryview, number: int) -> list[memoryview]:
    return [value for field, value in _fields(message) if field == number]


def _first(message: memoryview, number: int) -> memoryview:
    """The field's value, empty where it is absent."""
    return next((value for field, value in _fields(message) if field == number), message[:0])


def _ints(packed: memoryview) -> list[int]:
    values, at = [], 0
    while at < len(packed):
        value, at = _varint(packed, at)
        values.append(value)
    return values


def _int(value: memoryview) -> int:
    return _ints(value)[0] if value else 0
