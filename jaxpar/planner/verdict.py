"""When nothing meets what is asked: the constraint that binds, the nearest plan, and by how much it misses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from jaxpar.planner.estimate import Estimate
from jaxpar.planner.search import Found
from jaxpar.planner.shares import decode_parts, prefill_parts
from jaxpar.tables import counted, human_bytes


@dataclass(frozen=True)
class Miss:
    """`constraint` ("memory", "TTFT" or "TPOT") is missed by the factor `by`; `text` says it in one line."""

    constraint: str
    needed: float
    allowed: float
    text: str

    @property
    def by(self) -> float:
        """How many times what is allowed is needed."""
        return self.needed / self.allowed


def miss_of(found: Found) -> Miss | None:
    """What the best plan misses, None if it misses nothing."""
    if found.met or not found.best:
        return None
    one, targets = found.best[0], found.question.targets
    name, asked = meshes_of(one), counted(one.batch, "request")
    if not one.fits:
        memory = one.fullest
        most = f"{memory.largest} {human_bytes(memory.items[memory.largest])}"
        requests, mesh = found.most
        room = f"; {counted(requests, 'request')} would fit, on {mesh}" if requests else ""
        return Miss(
            "memory",
            memory.total,
            memory.device_bytes,
            f"nothing fits {asked}: the nearest, {name}, needs {human_bytes(memory.total)} a device, "
            f"{human_bytes(memory.over)} more than it has; most is {most}{room}",
        )
    times = {
        "TTFT": (one.ttft, targets.ttft, lambda each: each.ttft, prefill_parts(one)),
        "TPOT": (one.tpot, targets.tpot, lambda each: each.tpot, decode_parts(one)),
    }
    given = {key: value for key, value in times.items() if value[1] is not None}
    binding = max(given, key=lambda key: given[key][0] / (given[key][1] or 1))
    value, target, of, parts = given[binding]
    assert target is not None
    part = max(parts, key=lambda key: parts[key])
    text = (
        f"no plan meets all targets, and {binding} binds: the nearest, {name} with {asked}, has "
        f"{1e3 * value:.4g} ms where {1e3 * target:.4g} are allowed, {value / target:.3g} times as much; most of it is "
        f"{part}, {1e3 * parts[part]:.4g} ms"
    )
    alone = _least(found.seen, of)
    if alone is not None and of(alone) < value * 0.999:
        text += f". By itself {binding} can be {1e3 * of(alone):.4g} ms, on {meshes_of(alone)}"
    return Miss(binding, value, target, text)


def _least(seen: Iterable[Estimate], of: Callable[[Estimate], float]) -> Estimate | None:
    return min((one for one in seen if one.fits), key=of, default=None)


def meshes_of(one: Estimate) -> str:
    """The mesh, or those of both pools."""
    return " + ".join(str(pool.plan.mesh) for pool in one.pools)
