"""A row of the ledger: what one collective of one strategy sends, and what its algorithm makes of a message.

P is the number of ranks in a group, M the bytes of a rank's local operand. "Sent" is what one rank puts on the wire:

    all_reduce      2(P-1)/P M    ring: a reduce-scatter, then an all-gather of the sums
    reduce_scatter   (P-1)/P M    the operand is the whole array, of which a rank keeps 1/P
    all_gather       (P-1)   M    the operand is a rank's own part
    all_to_all       (P-1)/P M    1/P of the operand stays
    ppermute                 M    on a rank that sends; a rank without a target sends nothing
    broadcast                M    every rank but the last of the chain passes it on
    ragged_all_to_all        M    of a rank's operand and its result the smaller: the most that the mean rank may send,
                                  as what stays is known only when it runs

Every figure is a whole number of bytes a call, rounded up where P does not divide it: a ring that pads its last chunk
sends no less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Traffic:
    """What the calls of one collective send, on one rank.

    `axes` are mesh axes in the mesh's order, each of size over 1; `message_bytes` the size of a rank's local operand in
    one call; `sent_bytes` what a rank sends over all `calls`. Both counts are of one step where `per` is empty, and of
    one iteration of the loop that `per` names where the trip count is known only when it runs ("rounds"; loops in loops
    are joined by "*"). `ranks` is the size of the groups where they are equal parts of the axes; 0: all their ranks.
    """

    sublayer: str
    strategy: str
    collective: str
    axes: tuple[str, ...]
    calls: int
    message_bytes: int
    sent_bytes: int
    per: str = ""
    ranks: int = 0

    @property
    def steps(self) -> int:
        """Messages that have to follow one another in all calls, each of which pays the latency of a link."""
        return self.calls * steps_of(self.collective)

    def to_json(self) -> dict[str, Any]:
        """The fields and the steps, as plain data."""
        return asdict(self) | {"steps": self.steps}


def all_reduce_bytes(message_bytes: int, ranks: int) -> int:
    """Sent by a ring or two-shot all-reduce."""
    return _ceil_div(2 * (ranks - 1) * message_bytes, ranks)


def reduce_scatter_bytes(message_bytes: int, ranks: int) -> int:
    """Sent by a reduce-scatter of a local array of `message_bytes`."""
    return _ceil_div((ranks - 1) * message_bytes, ranks)


def all_gather_bytes(message_bytes: int, ranks: int) -> int:
    """Sent by an all-gather of parts of `message_bytes` each."""
    return (ranks - 1) * message_bytes


def all_to_all_bytes(message_bytes: int, ranks: int) -> int:
    """Sent by an all-to-all of a local array of `message_bytes`."""
    return _ceil_div((ranks - 1) * message_bytes, ranks)


def point_to_point_bytes(message_bytes: int, ranks: int) -> int:
    """Sent by a rank that passes its whole message on to another one."""
    return message_bytes if ranks > 1 else 0


SENT_BYTES: Mapping[str, Callable[[int, int], int]] = MappingProxyType(
    {
        "all_reduce": all_reduce_bytes,
        "reduce_scatter": reduce_scatter_bytes,
        "all_gather": all_gather_bytes,
        "all_to_all": all_to_all_bytes,
        "ppermute": point_to_point_bytes,
        "broadcast": point_to_point_bytes,
        "ragged_all_to_all": point_to_point_bytes,
    }
)
"""Every collective that the ledger knows -> (bytes of a message, ranks of a group) -> bytes that a rank sends."""


STEPS: Mapping[str, int] = MappingProxyType({"all_reduce": 2})
"""Steps of a call: in one every rank sends to all others at once; an all-reduce makes sums first, then sends them."""


def steps_of(collective: str) -> int:
    """Steps of one call."""
    return STEPS.get(collective, 1)


def merge(rows: Iterable[Traffic]) -> list[Traffic]:
    """Rows that differ only in their calls become one, in the order in which each first stands."""
    merged: dict[tuple[Any, ...], Traffic] = {}
    for row in rows:
        key = row.sublayer, row.strategy, row.collective, row.axes, row.message_bytes, row.per, row.ranks
        seen = merged.get(key)
        merged[key] = (
            row
            if seen is None
            else replace(row, calls=seen.calls + row.calls, sent_bytes=seen.sent_bytes + row.sent_bytes)
        )
    return list(merged.values())


def times(row: Traffic, count: int) -> Traffic:
    """The row of as many steps."""
    return replace(row, calls=count * row.calls, sent_bytes=count * row.sent_bytes)


def compare(predicted: Iterable[Traffic], traced: Iterable[Traffic]) -> list[str]:
    """Where two ledgers of the same step differ, one line for each strategy, collective and axes; empty: they agree."""
    expected, found = _totals(predicted), _totals(traced)
    return [
        f"{key}: predicted {_describe(*expected.get(key, (0, 0)))}, traced {_describe(*found.get(key, (0, 0)))}"
        for key in dict.fromkeys([*expected, *found])
        if expected.get(key, (0, 0)) != found.get(key, (0, 0))
    ]


def _totals(rows: Iterable[Traffic]) -> dict[str, tuple[int, int]]:
    """(calls, bytes sent) by what the rows have in common, in words."""
    totals: dict[str, tuple[int, int]] = {}
    for row in rows:
        key = f"{row.sublayer}:{row.strategy} {row.collective} over {', '.join(row.axes)}"
        key += f" per {row.per}" if row.per else ""
        calls, sent = totals.get(key, (0, 0))
        totals[key] = (calls + row.calls, sent + row.sent_bytes)
    return totals


def _describe(calls: int, sent: int) -> str:
    return f"{calls} call{'s' * (calls != 1)} sending {sent} bytes" if calls else "none"


def _ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)
