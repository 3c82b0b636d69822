"""`auto` prefill attention: the ring that moves less for this step, keys and values or queries and partial results.

A first, long chunk has as many keys as queries, and fewer KV heads: its keys move. A short chunk after a long prefix
sees many keys: its queries move. Sizes are known when a step's program is made, so that each runs one of the two.
"""

from __future__ import annotations

from jaxpar.attention.prefill import ring, ring_q
from jaxpar.strategies import Choice, Step, least_sent


def resolve(step: Step) -> Choice:
    """`ring` or `ring_q`, by the bytes that each rank sends; where the order of sums is fixed `ring`."""
    if step.plan.fixed_order:
        return Choice(ring.STRATEGY.name, "the order in which it merges does not depend on other requests")
    return least_sent(step, (ring.STRATEGY, ring_q.STRATEGY))
