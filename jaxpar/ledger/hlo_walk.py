"""How often each instruction of a compiled program runs: loops multiplied out, branches of conditionals compared."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from jaxpar.ledger.hlo_text import Computation, Instruction, Module
from jaxpar.ledger.scope import loop_symbol, nested

Row = TypeVar("Row")


@dataclass(frozen=True)
class Site:
    """Where an instruction stands: its computation, how often that runs, and inside what.

    `calls` and `per` are as in `Traffic`. `caller` is the instruction that runs the computation, with the one that it
    stands in, None in the entry. `start` is the instruction that begins what runs beside other work, with the
    computation that it is in; None of what runs in turn.
    """

    computation: Computation
    calls: int = 1
    per: str = ""
    caller: tuple[Computation, Instruction] | None = None
    start: tuple[Computation, Instruction] | None = None


def walk(
    module: Module,
    visit: Callable[[Instruction, Site], Sequence[Row] | None],
    weigh: Callable[[Sequence[Row]], int],
    site: Site | None = None,
) -> list[Row]:
    """What `visit` says of all instructions, in the order of the schedule.

    Where it returns None, what the instruction runs is visited in its place. Trip counts are multiplied out where XLA
    notes them or the loop shows them; other loops are counted per iteration. Of a conditional the branch counts of
    which `weigh` gives most.
    """
    site = site or Site(module.entry)
    found: list[Row] = []
    for instruction in site.computation.instructions.values():
        rows = visit(instruction, site)
        found += inside(module, instruction, site, visit, weigh) if rows is None else rows
    return found


def inside(
    module: Module,
    instruction: Instruction,
    site: Site,
    visit: Callable[[Instruction, Site], Sequence[Row] | None],
    weigh: Callable[[Sequence[Row]], int],
) -> list[Row]:
    """What `walk` finds in the computations that an instruction runs."""
    if instruction.opcode.endswith(("-update", "-done")):
        return []
    caller = (site.computation, instruction)
    if instruction.opcode == "while":
        site = _in_loop(module, instruction, site)
    elif instruction.opcode.endswith("-start"):
        site = replace(site, start=caller)
    inner = [
        walk(module, visit, weigh, replace(site, computation=module.computations[called], caller=caller))
        for names in instruction.called.values()
        for called in names
    ]
    if instruction.opcode == "conditional":
        inner = [max(inner, key=weigh)]
    return [row for rows in inner for row in rows]


def _in_loop(module: Module, loop: Instruction, site: Site) -> Site:
    """What the body of a loop counts."""
    noted = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes)
    trips = int(noted[1]) if noted else _trip_count(module, site.computation, loop)
    if trips is not None:
        return replace(site, calls=site.calls * trips)
    since_outer_loop = re.split(r"while/(?:body|cond)/", loop.op_name)[-1]
    return replace(site, per=nested(site.per, loop_symbol(since_outer_loop)))


def _trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Trips of `for i = start; i < end; i += 1` with constant bounds, as every `scan` is; TPUs do not note them."""
    condition = module.computations[loop.called["condition"][0]]
    body = module.computations[loop.called["body"][0]]
    compare = condition.instructions[condition.root]
    if compare.opcode != "compare" or "direction=LT" not in compare.attributes:
        return None
    counter = condition.follow(compare.operands[0])
    found = re.search(r"index=(\d+)", counter.attributes) if counter else None
    carry, result = computation.follow(loop.operands[0]), body.instructions[body.root]
    if not found or carry is None or (carry.opcode, result.opcode) != ("tuple", "tuple"):
        return None
    index = int(found[1])
    start, end = _constant(computation, carry.operands[index]), _constant(condition, compare.operands[1])
    increment = body.follow(result.operands[index])
    if start is None or end is None or increment is None or increment.opcode != "add":
        return None
    before = body.follow(increment.operands[0])
    steps_from_itself = before is not None and f"index={index}," in f"{before.attributes},"
    return max(end - start, 0) if steps_from_itself and _constant(body, increment.operands[1]) == 1 else None


def _constant(computation: Computation, name: str) -> int | None:
    instruction = computation.follow(name)
    if instruction is None or instruction.opcode != "constant" or not re.fullmatch(r"-?\d+", instruction.arguments):
        return None
    return int(instruction.arguments)
