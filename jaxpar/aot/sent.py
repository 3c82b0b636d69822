"""The collectives of a compiled step: whose they are, what they send, and whether work hides them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from jaxpar.ledger.hlo import HloCollective
from jaxpar.ledger.hlo_overlap import Overlap
from jaxpar.plan import Plan
from jaxpar.presets import DeviceKind

Hidden = Literal["exposed", "partly", "hidden"]


@dataclass(frozen=True)
class Sent:
    """Calls of a collective that are alike: fields as in `HloCollective`, `sent_bytes` over all calls.

    `overlap` is the work between a call's start and its end, None of one that has neither. `wire_seconds` is what a
    call takes by the alpha-beta model of the device's links, `work_seconds` what that work takes at the device's peak
    or at the bandwidth of its memory, whichever is longer: figures of data sheets, no measurement.
    """

    sublayer: str
    strategy: str
    collective: str
    axes: tuple[str, ...] | None
    calls: int
    per: str
    message_bytes: int
    sent_bytes: int
    overlap: Overlap | None
    wire_seconds: float
    work_seconds: float

    @property
    def asynchronous(self) -> bool:
        """Whether other work may stand between start and end."""
        return self.overlap is not None

    @property
    def hidden_share(self) -> float:
        """The part of a call's time that the work between its start and end takes, at most 1."""
        return min(1.0, self.work_seconds / self.wire_seconds)

    @property
    def hidden(self) -> Hidden:
        """Whether that work takes as long as the call; less than a twentieth of it hides nothing."""
        share = self.hidden_share
        return "hidden" if share == 1 else "partly" if share >= 0.05 else "exposed"

    def to_json(self) -> dict[str, Any]:
        """All of it as plain data."""
        return asdict(self) | {
            "asynchronous": self.asynchronous,
            "hidden": self.hidden,
            "hidden_share": self.hidden_share,
        }


def sent_by(found: Iterable[HloCollective], plan: Plan, kind: DeviceKind) -> list[Sent]:
    """Collectives of a compiled program as rows, of which like ones are one; those over single ranks are left out."""
    rows: dict[Sent, Sent] = {}
    for one in found:
        if one.axes == ():
            continue
        row = _row(one, plan, kind)
        key = replace(row, calls=0, sent_bytes=0)
        seen = rows.get(key, key)
        rows[key] = replace(row, calls=seen.calls + row.calls, sent_bytes=seen.sent_bytes + row.sent_bytes)
    return list(rows.values())


def _row(one: HloCollective, plan: Plan, kind: DeviceKind) -> Sent:
    work = one.overlap or Overlap()
    return Sent(
        one.sublayer,
        one.strategy,
        one.collective,
        one.axes,
        one.calls,
        one.per,
        one.message_bytes,
        one.sent_bytes,
        one.overlap,
        wire_seconds=kind.links.seconds(one.collective, one.message_bytes, *_spread(one, kind.devices_per_node)),
        work_seconds=max(work.flops / kind.flops(plan.dtype), work.bytes / kind.memory_rate),
    )


def _spread(one: HloCollective, devices_per_node: int) -> tuple[int, int]:
    """Ranks of a group on one node, and nodes that it has ranks on: of the group that lies on most nodes."""
    nodes = [Counter(rank // devices_per_node for rank in set(group)) for group in one.groups]
    return max(((max(counts.values()), len(counts)) for counts in nodes), key=lambda spread: (spread[1], spread[0]))
