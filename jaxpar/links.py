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

    def seconds(self, collective: str, message_bytes: int, ranks: int, across_nodes: bool) -> float:
        """Of one call of a collective among `ranks`, of a local operand of `message_bytes`."""
        latency, bandwidth = self.latency, self.bandwidth
        if across_nodes:
            latency, bandwidth = self.internode_latency, self.internode_bandwidth
        is_ring = self.topology == "torus" and not across_nodes and collective != "ppermute"
        steps = steps_of(collective) * (max(1, ranks // 2) if is_ring else 1)
        return steps * latency + SENT_BYTES[collective](message_bytes, ranks) / bandwidth
