"""Overlap of sending and computing: work is cut into parts that depend on one another as little as can be.

A backend may run a collective beside any work that neither needs it nor is needed by it. What there is for it to choose
from, a program's order and dependencies say; nothing here starts or waits.

    decode_overlap         decode attention in parts of the requests        attention/decode/overlap.py
    two_batch_overlap      a step in two half batches, layer by layer       nn/decoder.py, engine/prefill.py
    single_batch_overlap   what experts made, sent back in blocks           moe/dispatch/rounds.py
"""

from __future__ import annotations


def even_parts(count: int, parts: int) -> list[int]:
    """The sizes of up to `parts` parts of `count` things, as even as can be."""
    parts = min(parts, count)
    return [count // parts + (part < count % parts) for part in range(parts)]
