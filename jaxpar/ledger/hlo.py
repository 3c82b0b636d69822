"""The compiled ledger: the collectives of a program as XLA schedules them, and what XLA made of the traced ones.

XLA may merge several all-reduces into one over a tuple, turn a reduce-scatter into an all-reduce and a slice, drop
what is unused or computed twice, add exchanges of its own; on CPUs it widens 16-bit operands to float32. The rows here
carry the ledger's words for collectives and axes, so that they compare with the traced ones.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from jaxpar.ledger.hlo_text import Computation, Instruction, Module, array_bytes, parse_module
from jaxpar.ledger.replica_groups import Groups, axes_of_groups, axes_of_pairs, parse_groups
from jaxpar.ledger.scope import loop_symbol, nested, scope_of
from jaxpar.ledger.traffic import SENT_BYTES

COLLECTIVES = {
    "all-reduce": "all_reduce",
    "reduce-scatter": "reduce_scatter",
    "all-gather": "all_gather",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "ragged_all_to_all",
    "collective-permute": "ppermute",
    "collective-broadcast": "broadcast",
}
"""The opcodes of HLO that communicate -> the ledger's words for them."""

_RESHAPING = frozenset({"copy", "bitcast", "reshape", "slice", "transpose", "concatenate", "broadcast"})


@dataclass(frozen=True)
class HloCollective:
    """One collective of a compiled program.

    `axes` are the mesh axes that `groups` span (of a ppermute: that its source-target pairs move along), None if the
    groups are no product of axes. `message_bytes` is the size of a rank's local operand in one call; `calls` and `per`
    are as in `Traffic`. `asynchronous`: it has a start and an end, and other work may stand between them. `promoted`:
    XLA may have turned 16-bit operands into float32, so that the program asked for half the bytes.
    """

    collective: str
    axes: tuple[str, ...] | None
    groups: Groups
    message_bytes: int
    calls: int
    per: str
    sublayer: str
    strategy: str
    asynchronous: bool
    promoted: bool

    @property
    def sent_bytes(self) -> int:
        """What one rank sends over all calls, as compiled."""
        ranks = max(len(set(group)) for group in self.groups)
        return self.calls * SENT_BYTES[self.collective](self.message_bytes, ranks)


@dataclass(frozen=True)
class _Context:
    """How often a computation runs, and inside what."""

    calls: int = 1
    per: str = ""
    asynchronous: bool = False


def parse_collectives(hlo_text: str, mesh_shape: Mapping[str, int]) -> list[HloCollective]:
    """The collectives in the text of a compiled program (`jax.stages.Compiled.as_text()`), as often as they run.

    `mesh_shape` are the axes of the program's mesh, outermost first. Trip counts are multiplied out where XLA notes
    them or the loop shows them; other loops are counted per iteration. Of a conditional the branch that sends most
    counts. Raises ValueError for a text or a notation that is not XLA's, and for groups that the mesh cannot hold.
    """
    return _walk(parse_module(hlo_text), None, mesh_shape, _Context())


def _walk(module: Module, name: str | None, mesh_shape: Mapping[str, int], context: _Context) -> list[HloCollective]:
    computation = module.entry if name is None else module.computations[name]
    found: list[HloCollective] = []
    for instruction in computation.instructions.values():
        opcode = instruction.opcode
        if opcode.removesuffix("-start") in COLLECTIVES:
            found.append(_collective(module, computation, instruction, mesh_shape, context))
        elif not opcode.endswith(("-update", "-done")):
            inside = context
            if opcode == "while":
                inside = _loop(module, computation, instruction, context)
            elif opcode.endswith("-start"):
                inside = _Context(context.calls, context.per, asynchronous=True)
            inner = [
                _walk(module, called, mesh_shape, inside) for names in instruction.called.values() for called in names
            ]
            if opcode == "conditional":
                inner = [max(inner, key=lambda rows: sum(row.sent_bytes for row in rows))]
            found += [row for rows in inner for row in rows]
    return found


def _collective(
    module: Module,
    computation: Computation,
    instruction: Instruction,
    mesh_shape: Mapping[str, int],
    context: _Context,
) -> HloCollective:
    collective = COLLECTIVES[instruction.opcode.removesuffix("-start")]
    # A TPU reduce-scatter is a fusion of this name around an all-reduce and a slice.
    if collective == "all_reduce" and computation.name.startswith("all-reduce-scatter"):
        collective = "reduce_scatter"
    groups = parse_groups(instruction.attributes, math.prod(mesh_shape.values()))
    axes = axes_of_pairs(groups, mesh_shape) if collective == "ppermute" else axes_of_groups(groups, mesh_shape)

    def size(operand: str) -> int:
        return array_bytes(computation.instructions[operand].shape)

    # The first operand of a ragged all-to-all is what a rank sends at most, the second what it gets at most, and the
    # others say where its pieces are.
    is_ragged = collective == "ragged_all_to_all"
    operands = [min(instruction.operands[:2], key=size)] if is_ragged else instruction.operands
    sublayer, strategy = scope_of(instruction.op_name)
    return HloCollective(
        collective,
        axes,
        groups,
        sum(map(size, operands)),
        context.calls,
        context.per,
        sublayer,
        strategy,
        asynchronous=context.asynchronous or instruction.opcode.endswith("-start"),
        promoted=any(name.endswith("_promoted") for name in instruction.called.get("to_apply", ()))
        or all(_is_promotion(module, computation, operand) for operand in operands),
    )


def _is_promotion(module: Module, computation: Computation, operand: str) -> bool:
    """Whether the value is a 16-bit one that was just converted to float32."""
    instruction = computation.instructions[operand]
    if instruction.opcode == "fusion":
        fused = module.computations[instruction.called["calls"][0]]
        return _is_promotion(module, fused, fused.root)
    if instruction.opcode == "convert":
        source = computation.instructions[instruction.operands[0]].shape
        return instruction.shape.startswith("f32") and source.startswith(("bf16", "f16"))
    return instruction.opcode in _RESHAPING and _is_promotion(module, computation, instruction.operands[0])


def _loop(module: Module, computation: Computation, loop: Instruction, context: _Context) -> _Context:
    """What the body of a loop counts."""
    noted = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes)
    trips = int(noted[1]) if noted else _trip_count(module, computation, loop)
    if trips is not None:
        return _Context(context.calls * trips, context.per, context.asynchronous)
    since_outer_loop = re.split(r"while/(?:body|cond)/", loop.op_name)[-1]
    return _Context(context.calls, nested(context.per, loop_symbol(since_outer_loop)), context.asynchronous)


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
