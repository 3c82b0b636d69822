"""What one layer's attention works on, as every strategy takes it, and the shapes that it goes through."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.attention.latent import Bag, Latent, attend_absorbed, expand
from jaxpar.attention.partial import Partial, Window, with_sinks
from jaxpar.attention.store import Pages
from jaxpar.collectives.move import Groups
from jaxpar.fixed import by_row
from jaxpar.kernels.attention import attend, attend_own_pages, attend_pages
from jaxpar.plan import Phase


class Inputs(NamedTuple):
    """A rank's queries and its bag of keys; B lanes, T tokens, K KV heads, each shared by `group` query heads.

    `q` [B, T, H, d] are the rank's K * group query heads, or its share of them where the strategy asked for that.
    `bag` is what the cache holds of the keys, and what of them moves: `k`, `v` [K, B, S, d]; or, where there is a
    `latent`, the latents and rotated keys [1, B, S, size] of which it makes keys and values.
    `q_positions` [B, T], `k_positions` [B, S]; -1 is padding. `window` is that of the layer or None, `scale` goes on
    the scores. `sinks` [K * group] are logits that take part in the softmax of their query head and have no value
    (gpt_oss), or None. Where heads are split inside, each size d is a rank's slice of it, and `groups` are the ranks of
    tp that have slices of the same heads. `fixed` is the phase where results must not depend on the number of lanes,
    queries or keys. `pages` are where the bag was gathered from, in decode of keys and values: what reads those
    needs no bag.
    """

    q: jax.Array
    bag: Bag
    q_positions: jax.Array
    k_positions: jax.Array
    window: Window
    scale: float
    group: int
    sinks: jax.Array | None = None
    latent: Latent | None = None
    groups: Groups = None
    fixed: Phase | None = None
    pages: Pages | None = None

    @property
    def kv_heads(self) -> int:
        """KV heads K of the rank."""
        return self.bag[0].shape[0] if self.latent is None else self.latent.up.shape[0]

    @property
    def grouped(self) -> jax.Array:
        """The queries as `attend` takes them [K, B, T, group, d]."""
        lanes, tokens, _, size = self.q.shape
        return self.q.reshape(lanes, tokens, -1, self.group, size).transpose(2, 0, 1, 3, 4)

    @property
    def value_size(self) -> int:
        """Numbers of a value, and of a head's output."""
        return self.bag[1].shape[3] if self.latent is None else self.latent.up.shape[1] - self.latent.key_size

    def expand(self, bag: Bag) -> Bag:
        """The keys and values of a rank's bag, on this rank's heads: [K, B, S, d] each."""
        return bag if self.latent is None else expand(self.latent, bag, self.fixed is not None)

    def attend(self) -> Partial:
        """Every query over the rank's own keys: Partial of [K, B, T, group, d], or [1, B, T, H, d] where absorbed."""
        if self.latent is not None and self.latent.absorbed:
            positions = self.q_positions, self.k_positions
            return attend_absorbed(self.latent, self.q, self.bag, *positions, self.scale, self.fixed)
        if self.pages is not None and self.fixed is None:
            positions = self.q_positions, self.k_positions
            return attend_pages(self.grouped, self.bag, self.pages, *positions, self.window, self.scale)
        keys = self.expand(self.bag)
        return attend(
            self.grouped, *keys, self.q_positions, self.k_positions, self.window, self.scale, fixed=self.fixed
        )

    def attended(self) -> jax.Array:
        """Attention [B, T, H, d] over all keys, which are the rank's own, in the order of positions (cp = 1)."""
        if self.pages is None or self.fixed is not None or self.sinks is not None:
            return self.finish(self.attend())
        positions = self.q_positions, self.k_positions
        out = attend_own_pages(self.grouped, self.bag, self.pages, *positions, self.window, self.scale)
        return by_token(out)

    def finish(self, part: Partial) -> jax.Array:
        """Partial of [K, B, T, group, d] over all keys that there are -> attention [B, T, H, d], with the sinks."""
        return self.weighed(Partial(by_token(part.out), by_token(part.lse)), self.sinks)

    def weighed(self, part: Partial, sinks: jax.Array | None) -> jax.Array:
        """The output [B, T, H, d] of a Partial over all keys, with the sinks of its heads."""
        lanes, tokens, *rest = part.out.shape
        out, lse = (x.reshape(lanes * tokens, *x.shape[2:]) for x in part)
        done = by_row(lambda *rows: with_sinks(Partial(*rows), sinks), out, lse, fixed=self.fixed is not None)
        return done.reshape(lanes, tokens, *rest)


def by_token(x: jax.Array) -> jax.Array:
    """[K, B, T, G, ...] -> [B, T, K * G, ...]."""
    heads, lanes, tokens, group, *rest = x.shape
    return jnp.moveaxis(x, 0, 2).reshape(lanes, tokens, heads * group, *rest)


def pad_heads(x: jax.Array, ranks: int) -> jax.Array:
    """[B, T, H, d] with heads of zeros after the H, up to a multiple of `ranks`."""
    padding = -x.shape[2] % ranks
    return jnp.pad(x, ((0, 0), (0, 0), (0, padding), (0, 0))) if padding else x
