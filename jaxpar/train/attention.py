"""Attention over whole sequences, as training wants it: no cache, all scores at once, few operations to differentiate.

The tiles of `attention.partial` save work and memory in prefill; differentiated, each of their merges would be kept.
"""

from __future__ import annotations

from collections.abc import Callable

import jax

from jaxpar.attention.cache import Planes
from jaxpar.attention.inputs import Inputs
from jaxpar.attention.partial import Partial, masked, products, weighted_values


class ChunkOnly:
    """No cache: queries see the keys of their own sequence alone."""

    def __init__(self, positions: jax.Array) -> None:
        """`positions` [B, T]."""
        self.key_positions = positions

    def update(self, planes: Planes, new: Planes) -> tuple[Planes, Callable[[], Planes]]:
        """The bag is what is new."""
        return planes, lambda: {name: x.transpose(2, 0, 1, 3) for name, x in new.items()}

    def pages(self, planes: Planes) -> None:
        """There are none."""


def attend_whole(x: Inputs) -> jax.Array:
    """Attention of every query over its sequence; each sees a key, itself at least -> [B, T, H, d] float32."""
    q, (k, v) = x.grouped, x.expand(x.bag)
    scores = masked(products(q, k) * x.scale, x.q_positions, x.k_positions, x.window)
    out = weighted_values(jax.nn.softmax(scores, axis=-1), v).reshape(*q.shape[:-1], x.value_size)
    return x.finish(Partial(out, jax.nn.logsumexp(scores, axis=-1).reshape(q.shape[:-1])))
