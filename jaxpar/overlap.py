"""Overlap of sending and computing: work is cut into parts that depend on one another as little as can be.

A backend may run a collective beside any work that neither needs it nor is needed by it. What there is for it to choose
from, a program's order and dependencies say; nothing here starts or waits.

    decode_overlap         decode attention in parts of the requests        attention/decode/overlap.py
    two_batch_overlap      a step in two half batches, layer by layer       program.py, nn/decoder.py, engine/prefill.py
    single_batch_overlap   what experts made, sent back in blocks           moe/dispatch/rounds.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp

T = TypeVar("T")


def even_parts(count: int, parts: int) -> list[int]:
    """The sizes of up to `parts` parts of `count` things, as even as can be."""
    parts = min(parts, count)
    return [count // parts + (part < count % parts) for part in range(parts)]


def in_halves(batch: T) -> list[T]:
    """The first and the second half of a batch's lanes: arrays [B, ...], B an even number."""
    return [jax.tree.map(lambda x: x[: len(x) // 2], batch), jax.tree.map(lambda x: x[len(x) // 2 :], batch)]


def joined(outputs: Sequence[T]) -> T:
    """What came of a batch, or of its two halves: arrays [B, ...] of all lanes."""
    together: T = jax.tree.map(lambda *parts: jnp.concatenate(parts) if len(parts) > 1 else parts[0], *outputs)
    return together
