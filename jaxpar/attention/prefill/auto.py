"""`auto` prefill attention: the ring that moves less for this step, keys and values or queries and partial results.

A first, long chunk has as many keys as queries, and fewer KV heads: its keys move. A short chunk after a long prefix
sees many keys: its queries move. Sizes are known when a step's program is made, so that each runs one of the two.
"""

from __future__ import annotations

from jaxpar.attention.prefill import ring, ring_q
from jaxpar.strategies import Step


def resolve(step: Step) -> str:
    """`ring` or `ring_q`, by the bytes that each rank sends."""
    sent = {one.name: sum(row.sent_bytes for row in one.traffic(step)) for one in (ring.STRATEGY, ring_q.STRATEGY)}
    return min(sent, key=lambda name: (sent[name], name))
