"""What XLA made of a program's collectives: the traced ledger held against the compiled one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jaxpar.ledger.hlo import HloCollective
from jaxpar.ledger.traffic import Traffic


@dataclass(frozen=True)
class Change:
    """How one kind of collective over one tuple of axes differs between the traced and the compiled program.

    `change` is "added" (bytes that nothing traced asked for), "removed", "merged" (the same bytes in fewer calls),
    "split" (in more), "resized" (other bytes in as many calls: padded, or gathered in another type) or "promoted"
    (16-bit operands sent as float32, as CPUs do; what else changed is told apart from it). Bytes are those of the local
    operands over all calls. `axes` is None for groups that are no axes of the mesh; `per` is as in `Traffic`.
    """

    change: str
    collective: str
    axes: tuple[str, ...] | None
    per: str
    traced_calls: int
    traced_bytes: int
    compiled_calls: int
    compiled_bytes: int

    def __str__(self) -> str:
        """One line, for people."""
        axes = "groups that are no axes of the mesh" if self.axes is None else ", ".join(self.axes)
        return (
            f"{self.change}: {self.collective} over {axes}{f' per {self.per}' if self.per else ''}: "
            f"traced {_describe(self.traced_calls, self.traced_bytes)}, "
            f"compiled {_describe(self.compiled_calls, self.compiled_bytes)}"
        )


def compare_compiled(traced: Iterable[Traffic], compiled: Iterable[HloCollective]) -> list[Change]:
    """What XLA added, merged, removed, split, resized or promoted, by collective and axes; empty if nothing.

    Collectives over single ranks send nothing and are left out. Scopes are not compared, as XLA keeps one of several
    that it merges, and none where it writes a collective anew.
    """
    groups: dict[tuple[str, tuple[str, ...] | None, str], tuple[list[Traffic], list[HloCollective]]] = {}
    for row in traced:
        groups.setdefault((row.collective, row.axes, row.per), ([], []))[0].append(row)
    for found in compiled:
        if found.axes != ():
            groups.setdefault((found.collective, found.axes, found.per), ([], []))[1].append(found)
    return [change for key, (before, after) in groups.items() for change in _changes(key, before, after)]


def _changes(
    key: tuple[str, tuple[str, ...] | None, str], traced: list[Traffic], compiled: list[HloCollective]
) -> list[Change]:
    before = sum(row.calls for row in traced), sum(row.calls * row.message_bytes for row in traced)
    calls, size = sum(row.calls for row in compiled), sum(row.calls * row.message_bytes for row in compiled)
    narrow = size - sum(row.calls * row.message_bytes // 2 for row in compiled if row.promoted)
    # Programs convert to float32 before they send, too: XLA did it if that brings the bytes nearer to the traced ones.
    is_promoted = size != narrow and abs(narrow - before[1]) < abs(size - before[1])
    changes = [Change("promoted", *key, *before, calls, size)] if is_promoted else []
    if what := _what(*before, calls, narrow if is_promoted else size):
        changes.append(Change(what, *key, *before, calls, size))
    return changes


def _what(traced_calls: int, traced_bytes: int, calls: int, size: int) -> str:
    if size == traced_bytes:
        return "merged" if calls < traced_calls else "split" if calls > traced_calls else ""
    if calls == traced_calls:
        return "resized"
    return "added" if size > traced_bytes else "removed"


def _describe(calls: int, size: int) -> str:
    return f"{calls} call{'s' * (calls != 1)}, {size} bytes in all" if calls else "nothing"
