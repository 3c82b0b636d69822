"""What one layer's attention works on, as every strategy takes it, and the shapes that it goes through."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.attention.partial import Partial
from jaxpar.attention.tiles import attend


class Inputs(NamedTuple):
    """A rank's queries and its bag of keys; B lanes, T tokens, K KV heads, each shared by `group` query heads.

    `q` [B, T, H, d] are the rank's K * group query heads, or its share of them where the strategy asked for that;
    `k`, `v` [K, B, S, d]; `q_positions` [B, T], `k_positions` [B, S]; -1 is padding. `window` is that of the layer or
    None, `scale` goes on the scores.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    q_positions: jax.Array
    k_positions: jax.Array
    window: int | None
    scale: float
    group: int

    @property
    def grouped(self) -> jax.Array:
        """The queries as `attend` takes them [K, B, T, group, d]."""
        lanes, tokens, _, size = self.q.shape
        return self.q.reshape(lanes, tokens, -1, self.group, size).transpose(2, 0, 1, 3, 4)

    def attend(self) -> Partial:
        """Every query over the rank's own keys: Partial of [K, B, T, group, d]."""
        return attend(self.grouped, self.k, self.v, self.q_positions, self.k_positions, self.window, self.scale)


def by_token(x: jax.Array) -> jax.Array:
    """[K, B, T, G, ...] -> [B, T, K * G, ...]."""
    heads, lanes, tokens, group, *rest = x.shape
    return jnp.moveaxis(x, 0, 2).reshape(lanes, tokens, heads * group, *rest)


def pad_heads(x: jax.Array, ranks: int) -> jax.Array:
    """[B, T, H, d] with heads of zeros after the H, up to a multiple of `ranks`."""
    padding = -x.shape[2] % ranks
    return jnp.pad(x, ((0, 0), (0, 0), (0, padding), (0, 0))) if padding else x
