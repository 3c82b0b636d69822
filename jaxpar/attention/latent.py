"""Multi-head latent attention over a bag of latents, with keys and values made for every head, or without any.

A token has one latent c [r] and one rotated key p [d_p] for all heads. Of head h the matrix `up` has a key part
U [d_n, r] and a value part W [d_v, r] (DeepSeek-V2, arXiv:2405.04434, kv_b_proj):

    expanded    q = [q_n, q_p]       k = [U c, p]    out = sum of weights times W c      small products, once k and v
                                                                                         are made: many queries
    absorbed    q = [U^T q_n, q_p]   k = [c, p]      out = W (sum of weights times c)    nothing is made of the cache,
                                                                                         which all heads read: decode

Both are the same function. What goes in and comes out has the sizes of a head, never those of a latent.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.attention.partial import Partial
from jaxpar.attention.tiles import attend, attend_flops
from jaxpar.checkpoint.config import MLAConfig

Bag = tuple[jax.Array, jax.Array]


class Latent(NamedTuple):
    """How a layer reads a bag of latents: `up` [H, d_n + d_v, r] of a rank's heads, and whether it is absorbed."""

    up: jax.Array
    key_size: int
    absorbed: bool


def expand(latent: Latent, bag: Bag) -> Bag:
    """Latents [1, B, S, r] and rotated keys [1, B, S, d_p] -> keys [H, B, S, d_n + d_p] and values [H, B, S, d_v]."""
    c, p = bag
    made = jnp.einsum("bsr,hor->hbso", c[0], latent.up, preferred_element_type=jnp.float32).astype(c.dtype)
    keys, values = made[..., : latent.key_size], made[..., latent.key_size :]
    return jnp.concatenate([keys, jnp.broadcast_to(p, (*keys.shape[:3], p.shape[3]))], axis=3), values


def attend_absorbed(
    latent: Latent, q: jax.Array, bag: Bag, q_positions: jax.Array, k_positions: jax.Array, scale: float
) -> Partial:
    """Queries [B, T, H, d_n + d_p] over a bag of latents -> Partial of [1, B, T, H, d_v]."""
    (c, p), n = bag, latent.key_size
    # Heads first: XLA:CPU has no product of 16-bit numbers that leaves them in the middle.
    absorbed = jnp.einsum("bthn,hnr->hbtr", q[..., :n], latent.up[:, :n], preferred_element_type=jnp.float32)
    q = jnp.concatenate([jnp.moveaxis(absorbed, 0, 2).astype(q.dtype), q[..., n:]], axis=3)
    part = attend(q[None], jnp.concatenate([c, p], axis=3), c, q_positions, k_positions, None, scale)
    out = jnp.einsum("kbthr,hvr->kbthv", part.out.astype(q.dtype), latent.up[:, n:], preferred_element_type=jnp.float32)
    return Partial(out, part.lse)


def expand_flops(mla: MLAConfig, lanes: int, heads: int, keys: int) -> int:
    """FLOPs of `expand` for `keys` of each lane."""
    return 2 * lanes * keys * heads * mla.kv_lora_rank * (mla.qk_nope_head_dim + mla.v_head_dim)


def absorbed_flops(mla: MLAConfig, lanes: int, heads: int, queries: int, keys: int) -> int:
    """FLOPs of `attend_absorbed`, every tile counted."""
    key, value = mla.kv_lora_rank + mla.qk_rope_head_dim, mla.kv_lora_rank
    products = expand_flops(mla, lanes, heads, queries)  # as large, once for each query
    return products + attend_flops(lanes, heads, heads, queries, keys, key, value)
