"""The compiled ledger: the collectives of a program as XLA schedules them, and what XLA made of the traced ones.

XLA may merge several all-reduces into one over a tuple, turn a reduce-scatter into an all-reduce and a slice, drop
what is unused or computed twice, add exchanges of its own; on CPUs it widens 16-bit operands to float32. The rows here
carry the ledger's words for collectives and axes, so that they compare with the traced ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from jaxpar.ledger.hlo_overlap import Overlap, overlap_of
from jaxpar.ledger.hlo_text import Computation, Instruction, Module, array_bytes, parse_module
from jaxpar.ledger.hlo_walk import Site, walk
from jaxpar.ledger.replica_groups import Groups, axes_of_groups, axes_of_pairs, parse_groups
from jaxpar.ledger.scope import scope_of
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
    are as in `Traffic`. `promoted`: XLA may have turned 16-bit operands into float32, so that the program asked for
    half the bytes. `overlap` is the work between start and end, None if it has neither.
    """

    collective: str
    axes: tuple[str, ...] | None
    groups: Groups
    message_bytes: int
    calls: int
    per: str
    sublayer: str
    strategy: str
    promoted: bool
    overlap: Overlap | None = None

    @property
    def asynchronous(self) -> bool:
        """Whether it has a start and an end, between which other work may stand."""
        return self.overlap is not None

    @property
    def sent_bytes(self) -> int:
        """What one rank sends over all calls, as compiled."""
        ranks = max(len(set(group)) for group in self.groups)
        return self.calls * SENT_BYTES[self.collective](self.message_bytes, ranks)


def parse_collectives(hlo_text: str, mesh_shape: Mapping[str, int]) -> list[HloCollective]:
    """The collectives in the text of a compiled program (`jax.stages.Compiled.as_text()`), as often as they run.

    `mesh_shape` are the axes of the program's mesh, outermost first. Trip counts are multiplied out where XLA notes
    them or the loop shows them; other loops are counted per iteration. Of a conditional the branch that sends most
    counts. Raises ValueError for a text or a notation that is not XLA's, and for groups that the mesh cannot hold.
    """
    return collectives_of(parse_module(hlo_text), mesh_shape)


def collectives_of(module: Module, mesh_shape: Mapping[str, int]) -> list[HloCollective]:
    """`parse_collectives` of a text that is cut already."""

    def visit(instruction: Instruction, site: Site) -> list[HloCollective] | None:
        if instruction.opcode.removesuffix("-start") in COLLECTIVES:
            return [_collective(module, instruction, site, mesh_shape)]
        return None

    return walk(module, visit, lambda rows: sum(row.sent_bytes for row in rows))


def _collective(module: Module, instruction: Instruction, site: Site, mesh_shape: Mapping[str, int]) -> HloCollective:
    computation = site.computation
    start = (computation, instruction) if instruction.opcode.endswith("-start") else site.start
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
    sublayer, strategy = scope_of(_path(instruction, site))
    return HloCollective(
        collective,
        axes,
        groups,
        sum(map(size, operands)),
        site.calls,
        site.per,
        sublayer,
        strategy,
        promoted=any(name.endswith("_promoted") for name in instruction.called.get("to_apply", ()))
        or all(_is_promotion(module, computation, operand) for operand in operands),
        overlap=overlap_of(module, *start) if start else None,
    )


def _path(instruction: Instruction, site: Site) -> str:
    """The named scopes of a collective; of one that XLA has written anew, those of the value that it takes."""
    place: tuple[Computation, Instruction | None] = (site.computation, instruction)
    if not instruction.op_name and site.caller:
        place = site.caller
    computation, made = place
    while made and not made.op_name and made.operands:
        made = computation.instructions.get(made.operands[0])
    return made.op_name if made else ""


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
