"""The text of a compiled HLO module, cut into computations and instructions.

Only what the ledger needs is read; layouts, tiles and memory spaces are skipped. An instruction may run over several
lines (backend configurations do), so one ends where the next one or the next computation begins.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

_HEADER = re.compile(r"(ENTRY )?%?([\w.$-]+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.$-]+) = (\S.*)")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_NAME = re.compile(r"%?([\w.$-]+)$")
_CALLED = re.compile(r"\b(calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.$-]+)")
_CALLED_SETS = re.compile(r"\b(branch_computations|called_computations)=\{([^}]*)\}")


@dataclass(frozen=True)
class Instruction:
    """`%name = shape opcode(arguments), attributes`."""

    name: str
    shape: str
    opcode: str
    arguments: str
    attributes: str

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the instructions that it takes."""
        found = (_NAME.search(argument.strip()) for argument in self.arguments.split(", "))
        return tuple(match[1] for match in found if match)

    @cached_property
    def called(self) -> dict[str, tuple[str, ...]]:
        """Names of the computations that it runs, by the attribute that names them."""
        singles = {attribute: (name,) for attribute, name in _CALLED.findall(self.attributes)}
        sets = _CALLED_SETS.findall(self.attributes)
        return singles | {attribute: tuple(re.findall(r"[\w.$-]+", names)) for attribute, names in sets}

    @cached_property
    def op_name(self) -> str:
        """The path of named scopes that it was written under, "" if XLA kept none."""
        found = re.search(r'\bop_name="([^"]*)"', self.attributes)
        return found[1] if found else ""


@dataclass(frozen=True)
class Computation:
    """Instructions by name, in the order in which they are scheduled, and the name of the one it gives."""

    name: str
    instructions: dict[str, Instruction]
    root: str

    def follow(self, name: str) -> Instruction | None:
        """The instruction that makes the value `name`, through copies of it; None if it is made elsewhere."""
        instruction = self.instructions.get(name)
        while instruction and instruction.opcode in ("copy", "bitcast"):
            instruction = self.instructions.get(instruction.operands[0])
        return instruction


@dataclass(frozen=True)
class Module:
    """A compiled program."""

    computations: dict[str, Computation]
    entry: Computation


def parse_module(text: str) -> Module:
    """Cut the text that `jax.stages.Compiled.as_text` gives. Raises ValueError if it has no entry computation."""
    computations: dict[str, Computation] = {}
    entry = None
    name, lines = "", list[str]()
    for line in [*text.splitlines(), "ENTRY end () -> () {"]:
        if header := _HEADER.match(line):
            if name:
                computations[name] = _computation(name, lines)
            name, lines = header[2], []
            entry = entry or (name if header[1] else None)
        elif _INSTRUCTION.match(line) or not lines:
            lines.append(line)
        else:
            lines[-1] += line
    if entry is None or entry not in computations:
        raise ValueError("this is not the text of a compiled HLO module: it has no ENTRY computation")
    return Module(computations, computations[entry])


def array_bytes(shape: str) -> int:
    """Bytes of an array or of a tuple of arrays, as its shape is written; tokens and the like take none."""
    total = 0
    for dtype, dimensions in _ARRAY.findall(shape):
        digits = re.search(r"\d+", dtype)
        bits = int(digits[0]) if digits else 8 * (dtype == "pred")
        total += -(-bits * math.prod(int(size.lstrip("<=")) for size in dimensions.split(",") if size) // 8)
    return total


def argument_bytes(module: Module, name: str = "") -> int:
    """Bytes of the arguments whose names begin so, without padding; what a program does not use, JAX leaves out."""
    values = module.entry.instructions.values()
    taken = [value for value in values if value.opcode == "parameter" and value.op_name.startswith(name)]
    return sum(array_bytes(value.shape) for value in taken)


def array_shape(shape: str) -> list[int]:
    """Sizes of an array's dimensions, or of the first array's of a tuple."""
    found = _ARRAY.search(shape)
    return [int(size.lstrip("<=")) for size in found[2].split(",") if size] if found else []


def _computation(name: str, lines: Iterable[str]) -> Computation:
    instructions: dict[str, Instruction] = {}
    root = ""
    for line in lines:
        if match := _INSTRUCTION.match(line):
            instructions[match[2]] = _instruction(match[2], re.sub(r"/\*.*?\*/", "", match[3]))
            root = match[2] if match[1] else root
    return Computation(name, instructions, root)


def _instruction(name: str, text: str) -> Instruction:
    """`text` is what stands after "%name = "."""
    end = _closing(text, 0) if text.startswith("(") else text.index(" ")
    shape, rest = text[:end], text[end:].lstrip()
    opening = rest.index("(")
    closing = _closing(rest, opening)
    return Instruction(name, shape, rest[:opening], rest[opening + 1 : closing - 1], rest[closing:])


def _closing(text: str, opening: int) -> int:
    """The position after the parenthesis that closes the one at `opening`."""
    depth = 0
    for parenthesis in re.compile(r"[()]").finditer(text, opening):
        depth += 1 if parenthesis[0] == "(" else -1
        if depth == 0:
            return parenthesis.end()
    raise ValueError(f"unbalanced parentheses in {text[:80]!r}")
