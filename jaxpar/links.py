"""What a deployment says of the links between its devices, and how long a message takes over them.

The alpha-beta model: a step costs its latency and its bytes over the bandwidth; steps that wait for one another add up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from jaxpar.ledger.traffic import SENT_BYTES, steps_of

Topology = Literal["switch", "torus"]
TOPOLOGIES: tuple[Topology, ...] = get_args(Topology)


@dataclass(frozen=True)
class Links:
    """Bandwidths in bytes per second of a device, one way, and latencies in seconds of a step.

    Without the prefix they hold within a node. `topology`: by a switch every rank reaches every other in one step; on
    a torus ranks lie on a ring, and what goes from each to all takes half a round.
    """

    bandwidth: float
    latency: float
    internode_bandwidth: float
    internode_latency: float
    topology: Topology = "switch"

    def seconds(self, collective: str, message_bytes: int, ranks: int, across_nodes: bool, distance: int = 1) -> float:
        """Of one call of a collective among `ranks`, of a local operand of `message_bytes`.

        A ppermute goes to the rank so many places on; on a torus each place is a hop, and all messages share its links.
        """
        steps, sent = steps_of(collective), SENT_BYTES[collective](message_bytes, ranks)
        if across_nodes:
            return steps * self.internode_latency + sent / self.internode_bandwidth
        hops = 1
        if self.topology == "torus":
            hops = min(distance, ranks - distance) if collective == "ppermute" else max(1, ranks // 2)
            sent *= hops if collective == "ppermute" else 1
        return steps * hops * self.latency + sent / self.bandwidth
