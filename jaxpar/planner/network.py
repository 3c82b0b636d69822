"""How long the rows of a ledger take over the links that their axes really cross. Plain arithmetic, without JAX.

    mesh dp=2,cp=2,tp=4, nodes of 8                      a group has            so it takes
    tp    ranks 0 1 2 3                                  4 ranks on 1 node      the fast links
    dp    ranks 0 8                                      1 rank on 2 nodes      the slow links
    dp,tp ranks 0 1 2 3 8 9 10 11                        4 ranks on 2 nodes     both: inside, across, inside

The model of one call is that of `links.py`: latency and bandwidth, or what `jaxpar calibrate` has measured.
"""

from __future__ import annotations

from functools import lru_cache

from jaxpar.ledger.traffic import Traffic
from jaxpar.links import Links
from jaxpar.mesh import MeshSpec
from jaxpar.nodes import members
from jaxpar.presets import DeviceKind


def seconds(row: Traffic, mesh: MeshSpec, device: DeviceKind) -> float:
    """All calls of a row, one after the other; of one iteration where the row is of one (`row.per`).

    Nodes are `device.devices_per_node` consecutive ranks of `mesh`. A ppermute is taken to go to a neighbour.
    """
    if not row.axes or not row.calls:
        return 0.0
    inside, across = group(row, mesh, device.devices_per_node)
    return row.calls * _of_a_call(device.links, row.collective, row.message_bytes, inside, across)


def group(row: Traffic, mesh: MeshSpec, devices_per_node: int) -> tuple[int, int]:
    """Ranks of a row's groups on one node, and nodes that they have ranks on.

    Groups that are parts of the axes are consecutive ranks, as those of `usp` and of `two_level` inside a node; the
    others of `two_level` have a rank on each node.
    """
    inside, across = members(mesh, devices_per_node, row.axes)
    if row.ranks in (0, inside * across):
        return inside, across
    if row.strategy == "two_level" and row.ranks == across:
        return 1, across
    return min(row.ranks, inside), -(-row.ranks // inside)


@lru_cache(maxsize=65536)
def _of_a_call(links: Links, collective: str, message_bytes: int, inside: int, across: int) -> float:
    return links.seconds(collective, message_bytes, inside, across)
