"""What stands between the start and the end of an asynchronous collective: the work that its way may hide behind."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from jaxpar.ledger.hlo_flops import flops_of
from jaxpar.ledger.hlo_text import Computation, Instruction, Module, array_bytes
from jaxpar.ledger.scope import UNSCOPED, scope_of

_WORK = frozenset({"fusion", "dot", "convolution", "custom-call", "while", "conditional", "call", "reduce", "sort"})
_SLICES = frozenset({"dynamic-slice", "slice", "gather"})


@dataclass(frozen=True)
class Overlap:
    """The work between a start and its end, in one call.

    `products` are instructions with matrix products in them, of `flops` in all, `others` fusions, loops and kernels
    without. `bytes` is the memory that they read and write, and `names` says whose work it is: "<sublayer>:<strategy>",
    or the name of a kernel.
    """

    products: int = 0
    others: int = 0
    flops: int = 0
    bytes: int = 0
    names: tuple[str, ...] = ()

    @property
    def instructions(self) -> int:
        """How many there are; 0: the collective is asynchronous in name alone."""
        return self.products + self.others


def overlap_of(module: Module, computation: Computation, start: Instruction) -> Overlap:
    """What is scheduled between `start`, an instruction of `computation`, and the end of what it starts."""
    products = others = flops = moved = 0
    names: dict[str, None] = {}
    for instruction in _between(computation, start):
        if instruction.opcode not in _WORK:
            continue
        count = flops_of(module, computation, instruction)
        products, others, flops = products + (count > 0), others + (count == 0), flops + count
        moved += _bytes(module, computation, instruction)
        names.setdefault(_name(instruction))
    return Overlap(products, others, flops, moved, tuple(names))


def _between(computation: Computation, start: Instruction) -> Iterator[Instruction]:
    under_way, begun = {start.name}, False
    for instruction in computation.instructions.values():
        if begun and not under_way.isdisjoint(instruction.operands):
            if instruction.opcode.endswith("-done"):
                return
            under_way.add(instruction.name)
        elif begun:
            yield instruction
        begun = begun or instruction.name == start.name


def _name(instruction: Instruction) -> str:
    scope = scope_of(instruction.op_name)
    if scope[0] != UNSCOPED:
        return ":".join(scope)
    target = re.search(r'custom_call_target="([^"]*)"', instruction.attributes)
    return target[1] if target else re.sub(r"[.\d]+$", "", instruction.name)


def _bytes(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Memory that an instruction reads and writes: of what it only slices, the slices; of a loop, nothing."""
    if instruction.opcode in ("while", "conditional", "call"):
        return 0
    inner = module.computations[instruction.called["calls"][0]] if instruction.opcode == "fusion" else None
    total = array_bytes(instruction.shape)
    for number, operand in enumerate(instruction.operands):
        source = computation.instructions.get(operand)
        whole = array_bytes(source.shape) if source else 0
        total += whole if inner is None else min(whole, _read(inner, number, whole))
    return total


def _read(fused: Computation, number: int, whole: int) -> int:
    """Of a fusion's parameter what is read: all of it, or the slices that are taken."""
    values = fused.instructions.values()
    name = next(i.name for i in values if i.opcode == "parameter" and i.arguments == str(number))
    users = [i for i in values if name in i.operands]
    sliced = all(i.opcode in _SLICES and i.operands[0] == name for i in users)
    return sum(array_bytes(i.shape) for i in users) if sliced else whole
