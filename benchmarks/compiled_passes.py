"""Which pass of XLA makes a compiled program's collectives differ from what the plan asks for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jaxpar.ledger.compiled import Change
from jaxpar.ledger.hlo import HloCollective
from jaxpar.ledger.traffic import Traffic
from jaxpar.tables import human_bytes

MERGED = "combiner: several collectives in one call, the same bytes"
SPLIT = "decomposer: one collective in several calls, the same bytes"
SCATTER = "reduce-scatter decomposer: all-reduce and slice, twice the bytes"
UNEVEN = "all-reduce-scatter fusion: shards of whole tiles, and a permute of the rows that are then elsewhere"
PROMOTED = "float normalization: 16-bit sums sent as float32"
REUSED = "common subexpressions and dead code: what is asked for twice, or not used, is sent once, or not"


@dataclass(frozen=True)
class Bytes:
    """What a rank sends: as predicted, as compiled, and the passes that explain a difference; `unexplained`: none does.

    Bytes are those of one iteration in loops whose trips are known only when they run, which stand under both sides.
    """

    predicted: int
    compiled: int
    passes: tuple[str, ...]
    unexplained: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether the same bytes are sent."""
        return self.predicted == self.compiled

    @property
    def cells(self) -> tuple[str, str, str]:
        """Of a table: predicted, compiled, and why they differ."""
        why = [name.split(":")[0] for name in (*self.passes, *["?"] * len(self.unexplained))]
        return human_bytes(self.predicted), "equal" if self.equal else human_bytes(self.compiled), "; ".join(why)


def explain(predicted: Iterable[Traffic], found: Iterable[HloCollective], changes: list[Change]) -> Bytes:
    """Name the pass behind each of `changes` (of `compare_compiled`)."""
    before = sum(row.sent_bytes for row in predicted)
    after = sum(row.sent_bytes for row in found if row.axes != ())
    passes: dict[str, None] = {}
    unexplained: list[str] = []
    left = changes
    for name, made in ((SCATTER, _scattered), (UNEVEN, _uneven)):
        others = [change for change in left if not made(change, changes)]
        if len(others) < len(left):
            passes.setdefault(name)
        left = others
    for change in left:
        name = _pass(change)
        if name:
            passes.setdefault(name)
        else:
            unexplained.append(str(change))
    return Bytes(before, after, tuple(passes), tuple(unexplained))


def _pass(change: Change) -> str:
    match change.change:
        case "merged":
            return MERGED
        case "split":
            return SPLIT
        case "promoted":
            return PROMOTED
        case "removed":
            return REUSED
    return ""


def _scattered(change: Change, changes: list[Change]) -> bool:
    """Whether it is one side of reduce-scatters that became all-reduces of the same operands over the same axes."""
    both = _with_scatters(change, changes, "all_reduce")
    if both is None:
        return False
    gone, come = both
    return gone.traced_bytes - gone.compiled_bytes == come.compiled_bytes - come.traced_bytes


def _uneven(change: Change, changes: list[Change]) -> bool:
    """Whether it is one side of reduce-scatters that grew by a multiple of what new permutes over the axes carry."""
    both = _with_scatters(change, changes, "ppermute")
    if both is None:
        return False
    grown, come = both
    more = grown.compiled_bytes - grown.traced_bytes
    return (grown.change, come.change) == ("resized", "added") and more > 0 == more % come.compiled_bytes


def _with_scatters(change: Change, changes: list[Change], other: str) -> tuple[Change, Change] | None:
    """What changed of reduce-scatters and of `other` over the axes of `change`, if it is of one and there are both."""
    both = {c.collective: c for c in changes if (c.axes, c.per) == (change.axes, change.per)}
    if change.collective not in ("reduce_scatter", other) or not {"reduce_scatter", other} <= both.keys():
        return None
    return both["reduce_scatter"], both[other]
