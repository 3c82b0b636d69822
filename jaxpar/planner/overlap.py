"""What of a step's collectives runs beside something that computes, as the plan's programs let it.

    ring, ring_q, usp       a hop of keys beside the attention that the keys before it need: N - 1 of N parts
    collective_matmul       hops of rows beside the products of the rows that have come: P - 1 of P parts
    decode_overlap n        what attention sends of one part of the requests beside the next: n - 1 of n parts
    single_batch_overlap n  rows that come back from experts beside the next block's products: n - 1 of n
    two_batch_overlap       everything that one half batch sends in a layer beside the other's work

No more is hidden than what computes lasts, and of that the part `overlap` of the assumptions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jaxpar.planner.roofline import Part
from jaxpar.registry import chosen
from jaxpar.strategies import Step

_RINGS = ("ring", "ring_q", "usp")
_LAYERED = ("attention", "ffn", "moe", "moe_dispatch", "prefill_attention", "decode_attention")


def hide(step: Step, parts: Sequence[Part], ringed: dict[str, float], overlap: float) -> list[Part]:
    """The parts of one batch with what it hides of itself.

    Args:
        step: of one batch.
        parts: as `parts_of` has them.
        ringed: seconds of each part's sending that go around rings, by name.
        overlap: the part of what may be hidden that is.
    """
    plan, by_name = step.plan, {part.name: part for part in parts}
    attend = f"{step.phase}_attention"
    name = chosen(step)[attend].name
    hidden: dict[str, float] = {}
    if step.phase == "prefill" and name in _RINGS:
        hidden[attend] = _hops(ringed.get(attend, 0.0), by_name[attend].working, plan.mesh.cp)
    if step.phase == "decode" and plan.decode_overlap > 1 and plan.sequence:
        hidden[attend] = _beside(by_name[attend].sent, by_name[attend].working, min(plan.decode_overlap, step.lanes))
    if plan.collective_matmul:
        for of in ("attention", "ffn"):
            if of in by_name:
                hidden[of] = _hops(ringed.get(of, 0.0), by_name[of].working, plan.mesh.tp)
    if plan.single_batch_overlap > 1 and "moe_dispatch" in by_name:
        back = by_name["moe_dispatch"].sent / 2
        hidden["moe_dispatch"] = _beside(back, by_name["experts"].working, plan.single_batch_overlap)
    return [replace(part, hidden=overlap * hidden.get(part.name, 0.0)) for part in parts]


def together(parts: Sequence[Part], layers: int, overlap: float) -> list[Part]:
    """Two equal half batches in turn, of which each has these parts: all layers, one behind the other.

    What layers send beside what they compute, the shorter within the longer; of one half the first layer has nothing
    before it and the last nothing after.
    """
    doubled = [_twice(part) for part in parts]
    sent = sum(part.sent - part.hidden for part in doubled if part.name in _LAYERED)
    computing = sum(part.working for part in doubled if part.name not in ("embedding", "head", "sampling"))
    if not sent:
        return doubled
    more = overlap * min(sent, computing) * (1 - 1 / (2 * layers)) / sent
    return [
        replace(part, hidden=part.hidden + more * (part.sent - part.hidden)) if part.name in _LAYERED else part
        for part in doubled
    ]


def _hops(sent: float, working: float, ranks: int) -> float:
    """Seconds of `ranks` - 1 hops that as many parts of the work hide, of `ranks`: each hop beside one."""
    return min(sent, working * (ranks - 1) / ranks)


def _beside(sent: float, working: float, parts: int) -> float:
    """Seconds of sending in as many parts as the work: each part's beside the next one's work."""
    return min(sent, working) * (parts - 1) / parts


def _twice(part: Part) -> Part:
    return replace(
        part.scaled(2),
        sending=tuple((axes, 2 * seconds) for axes, seconds in part.sending),
        hidden=2 * part.hidden,
    )
