"""The programs that a profile carries: for each operation by name, what it is and the scope it was written under.

A trace (an `XSpace` protocol buffer) stores the optimised HLO of every program that ran as serialized `HloProto`s in
its plane "/host:metadata", which `jax.profiler.ProfileData` does not show. Only a handful of fields are needed; their
numbers are those of tsl/profiler/protobuf/xplane.proto and xla/service/hlo.proto, which may grow but never renumber.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from jaxpar.ledger.hlo import COLLECTIVES
from jaxpar.ledger.scope import UNSCOPED, scope_of
from jaxpar.profile import wire

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
    for plane in wire.every(memoryview(xspace), 1):
        if wire.text(plane, 2) != "/host:metadata":
            continue
        for entry in wire.every(plane, 4):
            metadata = wire.first(entry, 2)
            for stat in wire.every(metadata, 5):
                if hlo := wire.first(stat, 6):
                    found[wire.text(metadata, 2)] = _operations(wire.first(hlo, 1))
    return found


def guess(name: str) -> Operation:
    """What an operation does by its name alone: for programs that the trace lacks (jax-ml/jax issue 37533)."""
    lower = name.lower()
    kind = next((kind for kind, pattern in _NAMES if re.search(pattern, lower)), None)
    return Operation(kind, "", re.sub(r"[.\d]+$", "", lower) in _CONTROL_FLOW, "-done" in lower)


def _operations(module: memoryview) -> dict[str, Operation]:
    computations = {wire.integer(c, 5): wire.every(c, 2) for c in wire.every(module, 3)}
    instructions = {wire.integer(i, 35): i for body in computations.values() for i in body}

    def collective(instruction: memoryview) -> str | None:
        opcode = wire.text(instruction, 2)
        base = opcode.removesuffix("-start").removesuffix("-done")
        if base in COLLECTIVES:
            return base
        # A fused or asynchronous collective stands in the computation that is called; -done follows its -start.
        inner: list[memoryview] = []
        if opcode in ("fusion", "async-start"):
            inner = [i for c in wire.integers(instruction, 38) for i in computations[c]]
        elif opcode in ("async-update", "async-done"):
            inner = [instructions[wire.integers(instruction, 36)[0]]]
        return next((kind for i in inner if (kind := collective(i))), None)

    operations = {}
    for instruction in instructions.values():
        opcode = wire.text(instruction, 2)
        names = scope_of(wire.text(wire.first(instruction, 7), 2))
        scope = "" if UNSCOPED in names else ":".join(names)
        operations[wire.text(instruction, 1)] = Operation(
            collective(instruction), scope, opcode in _CONTROL_FLOW, opcode.endswith("-done")
        )
    return operations
