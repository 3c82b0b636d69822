"""`auto` sums: the exact reduction that takes least time by the alpha-beta model of the preset's links (`links.py`).

    time    = steps * latency + bytes sent / bandwidth
    small messages    latency rules: few steps        one_shot
    large messages    bandwidth rules: few bytes      psum; two_level across nodes

A mesh that is no preset says nothing of its links, and gets `psum`. Quantized sums change results: none is chosen.
"""

from __future__ import annotations

from jaxpar.collectives.reduction import Call, Reduction, sublayers_calls
from jaxpar.collectives.reductions import one_shot, psum, ring, tree, two_level, two_shot
from jaxpar.links import Links
from jaxpar.nodes import members
from jaxpar.strategies import Choice, Step, Strategy

CANDIDATES: tuple[Strategy, ...] = (
    two_level.STRATEGY,
    psum.STRATEGY,
    one_shot.STRATEGY,
    two_shot.STRATEGY,
    ring.STRATEGY,
    tree.STRATEGY,
)
"""The first of equals is chosen: `two_level` is sure to go by levels, `psum` may."""


def resolve(step: Step) -> Choice:
    """The fastest candidate for the messages of this step, with the times of all."""
    links = step.plan.links
    if step.differentiated:
        return Choice("psum", "the one that has a derivative")
    if links is None:
        return Choice("psum", "the mesh says nothing of its links: give a preset for another")
    times = {
        strategy.name: sum(seconds(step, links, strategy.run(step.plan), call) for call in sublayers_calls(step))
        for strategy in CANDIDATES
        if strategy.check(step) is None
    }
    best = min(times, key=lambda name: float(f"{times[name]:.6g}"))  # sums in another order are equals
    others = "".join(f", {name} {1e6 * time:.4g}" for name, time in times.items() if name != best)
    return Choice(best, f"takes {1e6 * times[best]:.4g} us a step by its links{others}")


def seconds(step: Step, links: Links, reduction: Reduction, call: Call) -> float:
    """What all calls of one operation take, one after the other."""
    total = 0.0
    for message in reduction.sends(step, call):
        inside, across = members(step.plan.mesh, step.plan.devices_per_node, message.axes or call.axes)
        if message.ranks and message.ranks < inside * across:  # groups of one node, or of one rank of each
            inside, across = (message.ranks, 1) if message.inside else (1, message.ranks)
        one = links.seconds(message.collective, message.size, inside, across, message.distance)
        total += message.calls * one
    return total
