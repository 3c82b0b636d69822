"""The collectives of a compiled step: whose they are, what they send, and whether work hides them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from jaxpar.ledger.hlo import HloCollective
from jaxpar.ledger.hlo_overlap import Overlap
from jaxpar.nodes import levels
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
    def hidden(self) -> Hidden:
        """Whether the work in between takes as long as the call; "exposed" where there is none."""
        if self.overlap is None or not self.overlap.instructions:
            return "exposed"
        return "hidden" if self.work_seconds >= self.wire_seconds else "partly"

    def to_json(self) -> dict[str, Any]:
        """All of it as plain data."""
        return asdict(self) | {"asynchronous": self.asynchronous, "hidden": self.hidden}


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
    ranks = max(len(set(group)) for group in one.groups)
    where = levels(plan, plan.mesh.active(plan.mesh.sizes) if one.axes is None else one.axes)
    across = bool(where.across or where.both)
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
        wire_seconds=kind.links.seconds(one.collective, one.message_bytes, ranks, across),
        work_seconds=max(work.flops / kind.peak_bf16_flops, work.bytes / kind.memory_bandwidth),
    )
