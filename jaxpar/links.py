"""What a deployment says of the links between its devices, and how long a message takes over them.

The alpha-beta model: a step costs its latency and its bytes over the bandwidth; steps that wait for one another add up
(Hockney, Parallel Computing 20, 1994; Thakur et al., IJHPCA 2005). Where `jaxpar calibrate` has measured a collective,
its own lines are used instead.

A group that has several ranks on each of several nodes may go by levels, so that a slow link carries one part of each
rank; the backend takes the faster way, as NCCL's rings over all network cards do:

    all_reduce        reduce-scatter inside, all-reduce of the part across, all-gather inside
    reduce_scatter    reduce-scatter inside, then of the part across
    all_gather        all-gather across, then of what came inside
    all_to_all        what stays on the node goes inside, the rest across
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, get_args

from jaxpar.ledger.traffic import SENT_BYTES, steps_of

Topology = Literal["switch", "torus"]
TOPOLOGIES: tuple[Topology, ...] = get_args(Topology)

Level = Literal["inside", "across"]
LEVELS: tuple[Level, ...] = get_args(Level)


@dataclass(frozen=True)
class Fit:
    """What a collective was measured to take among `ranks` of one node, or of as many nodes.

    A call of a local operand of M bytes takes the least of `alpha + beta * M` over the (alpha, beta) of `lines`, in
    seconds and seconds a byte: several lines are several algorithms, of which the backend takes the fastest.
    `error` is the typical part by which the fit misses what was measured.
    """

    collective: str
    ranks: int
    level: Level
    lines: tuple[tuple[float, float], ...]
    error: float = 0.0

    def seconds(self, message_bytes: float, ranks: int) -> float:
        """Of a local operand of so many bytes; other numbers of ranks pay for the bytes that they send."""
        if ranks != self.ranks and message_bytes:
            sent = SENT_BYTES[self.collective]
            message_bytes *= sent(math.ceil(message_bytes), ranks) / sent(math.ceil(message_bytes), self.ranks)
        return min(alpha + beta * message_bytes for alpha, beta in self.lines)


@dataclass(frozen=True)
class Links:
    """Bandwidths in bytes per second of a device, one way, and latencies in seconds of a step.

    Without the prefix they hold within a node. `topology`: by a switch every rank reaches every other in one step; on
    a torus ranks lie on a ring, and what goes from each to all takes half a round. `fits` are collectives that were
    measured; the one of the nearest number of ranks counts.
    """

    bandwidth: float
    latency: float
    internode_bandwidth: float
    internode_latency: float
    topology: Topology = "switch"
    fits: tuple[Fit, ...] = field(default=(), hash=False)  # equal links have equal hashes without them, sooner

    def seconds(self, collective: str, message_bytes: int, inside: int, across: int = 1, distance: int = 1) -> float:
        """Of one call of a collective, of a local operand of `message_bytes`.

        Its group has `inside` ranks on each of `across` nodes. A ppermute goes to the rank so many places on; on a
        torus each place is a hop, and all messages share its links.
        """
        if across == 1:
            return self._over_one_level(collective, message_bytes, inside, "inside", distance)
        flat = self._over_one_level(collective, message_bytes, inside * across, "across", distance)
        parts = list(_by_levels(collective, message_bytes, inside, across)) if inside > 1 else []
        if not parts:
            return flat
        return min(flat, sum(self._over_one_level(name, size, ranks, level, 1) for name, size, ranks, level in parts))

    def _over_one_level(self, collective: str, message_bytes: int, ranks: int, level: Level, distance: int) -> float:
        hops = 1
        if self.topology == "torus" and level == "inside":
            hops = min(distance, ranks - distance) if collective == "ppermute" else max(1, ranks // 2)
        if fits := self._fits_of.get((collective, level)):
            fit = fits.get(ranks) or min(fits.values(), key=lambda one: abs(math.log(one.ranks / ranks)))
            return fit.seconds(message_bytes, ranks) * (hops if collective == "ppermute" else 1)
        steps, sent = steps_of(collective), SENT_BYTES[collective](message_bytes, ranks)
        if level == "across":
            return steps * self.internode_latency + sent / self.internode_bandwidth
        sent *= hops if collective == "ppermute" else 1
        return steps * hops * self.latency + sent / self.bandwidth

    @cached_property
    def _fits_of(self) -> dict[tuple[str, Level], dict[int, Fit]]:
        """Of each collective and level, by ranks."""
        found: dict[tuple[str, Level], dict[int, Fit]] = {}
        for fit in self.fits:
            found.setdefault((fit.collective, fit.level), {})[fit.ranks] = fit
        return found


def _by_levels(collective: str, size: int, inside: int, across: int) -> Iterator[tuple[str, int, int, Level]]:
    """The calls (collective, bytes, ranks, level) of a group that has `inside` ranks on each of `across` nodes."""
    part, kept = -(-size // inside), -(-size // across)
    if collective == "all_reduce":
        yield "reduce_scatter", size, inside, "inside"
        yield "all_reduce", part, across, "across"
        yield "all_gather", part, inside, "inside"
    elif collective == "reduce_scatter":
        yield "reduce_scatter", size, inside, "inside"
        yield "reduce_scatter", part, across, "across"
    elif collective == "all_gather":
        yield "all_gather", size, across, "across"
        yield "all_gather", across * size, inside, "inside"
    elif collective == "all_to_all":
        yield "all_to_all", kept, inside, "inside"
        yield "all_to_all", size, across, "across"
    elif collective == "ragged_all_to_all":
        yield "ragged_all_to_all", kept, inside, "inside"
        yield "ragged_all_to_all", size - kept, across, "across"
