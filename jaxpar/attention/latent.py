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

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.attention.partial import Partial
from jaxpar.attention.tiles import FIXED_KEYS, attend_flops
from jaxpar.checkpoint.config import MLAConfig
from jaxpar.fixed import in_tiles, whole_tiles
from jaxpar.kernels.attention import attend
from jaxpar.plan import Phase

Bag = tuple[jax.Array, jax.Array]


class Latent(NamedTuple):
    """How a layer reads a bag of latents: `up` [H, d_n + d_v, r] of a rank's heads, and whether it is absorbed."""

    up: jax.Array
    key_size: int
    absorbed: bool


def expand(latent: Latent, bag: Bag, fixed: bool = False) -> Bag:
    """Latents [1, B, S, r] and rotated keys [1, B, S, d_p] -> keys [H, B, S, d_n + d_p] and values [H, B, S, d_v].

    `fixed`: in products of one shape, whatever B and S are.
    """
    c, p = bag
    if fixed:
        rows = in_tiles(partial(_by_head, latent.up), c.reshape(-1, c.shape[3]), rows=FIXED_KEYS)
        made = rows.reshape(*c.shape[1:3], *rows.shape[1:]).transpose(2, 0, 1, 3)
    else:
        made = jnp.einsum("bsr,hor->hbso", c[0], latent.up, preferred_element_type=jnp.float32).astype(c.dtype)
    keys, values = made[..., : latent.key_size], made[..., latent.key_size :]
    return jnp.concatenate([keys, jnp.broadcast_to(p, (*keys.shape[:3], p.shape[3]))], axis=3), values


def _by_head(up: jax.Array, c: jax.Array) -> jax.Array:
    """Latents [N, r] -> keys and values [N, H, d_n + d_v]."""
    made = jnp.einsum("nr,hor->hno", c, up, preferred_element_type=jnp.float32).astype(c.dtype)
    return jnp.moveaxis(made, 0, 1)


def attend_absorbed(
    latent: Latent,
    q: jax.Array,
    bag: Bag,
    q_positions: jax.Array,
    k_positions: jax.Array,
    scale: float,
    fixed: Phase | None = None,
) -> Partial:
    """Queries [B, T, H, d_n + d_p] over a bag of latents -> Partial of [1, B, T, H, d_v]; `fixed` as in `attend`."""
    (c, p), n = bag, latent.key_size
    if fixed is not None:
        return _absorbed_in_tiles(latent, q, bag, q_positions, k_positions, scale, fixed)
    # Heads first: XLA:CPU has no product of 16-bit numbers that leaves them in the middle.
    absorbed = jnp.einsum("bthn,hnr->hbtr", q[..., :n], latent.up[:, :n], preferred_element_type=jnp.float32)
    q = jnp.concatenate([jnp.moveaxis(absorbed, 0, 2).astype(q.dtype), q[..., n:]], axis=3)
    part = attend(q[None], jnp.concatenate([c, p], axis=3), c, q_positions, k_positions, None, scale)
    out = jnp.einsum("kbthr,hvr->kbthv", part.out.astype(q.dtype), latent.up[:, n:], preferred_element_type=jnp.float32)
    return Partial(out, part.lse)


def _absorbed_in_tiles(
    latent: Latent,
    q: jax.Array,
    bag: Bag,
    q_positions: jax.Array,
    k_positions: jax.Array,
    scale: float,
    fixed: Phase,
) -> Partial:
    """`attend_absorbed` in products of one shape, whatever B and T are."""
    (c, p), n = bag, latent.key_size

    def before(q: jax.Array) -> jax.Array:
        made = jnp.einsum("nhk,hkr->hnr", q, latent.up[:, :n], preferred_element_type=jnp.float32)
        return jnp.moveaxis(made, 0, 1).astype(q.dtype)

    def after(out: jax.Array) -> jax.Array:
        return jnp.moveaxis(jnp.einsum("nhr,hvr->hnv", out, latent.up[:, n:], preferred_element_type=jnp.float32), 0, 1)

    rows = q.reshape(-1, *q.shape[2:])
    absorbed = in_tiles(before, rows[..., :n]).reshape(*q.shape[:3], -1)
    q = jnp.concatenate([absorbed, q[..., n:]], axis=3)
    keys = jnp.concatenate([c, p], axis=3)
    part = attend(q[None], keys, c, q_positions, k_positions, None, scale, fixed=fixed)
    out = in_tiles(after, part.out.astype(q.dtype).reshape(*rows.shape[:2], -1))
    return Partial(out.reshape(*part.lse.shape, -1), part.lse)


def expand_flops(mla: MLAConfig, heads: int, rows: int) -> int:
    """FLOPs of `expand` for so many keys of all lanes."""
    return 2 * rows * heads * mla.kv_lora_rank * (mla.qk_nope_head_dim + mla.v_head_dim)


def absorbed_flops(mla: MLAConfig, lanes: int, heads: int, queries: int, keys: int, fixed: bool = False) -> int:
    """FLOPs of `attend_absorbed`, every tile counted."""
    key, value = mla.kv_lora_rank + mla.qk_rope_head_dim, mla.kv_lora_rank
    rows = whole_tiles(lanes * queries) if fixed else lanes * queries
    products = expand_flops(mla, heads, rows)  # as large, once for each query
    return products + attend_flops(lanes, heads, heads, queries, keys, key, value, "decode" if fixed else None)
