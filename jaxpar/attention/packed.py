"""A partial result as one array, so that one collective carries its output and its LSE together."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.attention.partial import Partial


def pack(part: Partial, dtype: jnp.dtype) -> jax.Array:
    """Partial of [..., d] -> [..., d + 4 bytes]: outputs rounded to `dtype`, LSE in float32, all as unsigned integers.

    As integers nothing on the way takes half of an LSE for a number, and quiets it where it looks like a NaN.
    """
    word = _word(dtype)
    lse = lax.bitcast_convert_type(part.lse[..., None], word)
    out = lax.bitcast_convert_type(part.out.astype(dtype), word)
    return jnp.concatenate([out, lse.reshape(*part.lse.shape, -1)], axis=-1)


def unpack(packed: jax.Array, dtype: jnp.dtype) -> Partial:
    """What `pack` made, in float32."""
    values = 4 // packed.dtype.itemsize
    lse = packed[..., -values:]
    return Partial(
        lax.bitcast_convert_type(packed[..., :-values], dtype).astype(jnp.float32),
        lax.bitcast_convert_type(lse if values > 1 else lse[..., 0], jnp.float32),
    )


def packed_bytes(size: int, itemsize: int) -> int:
    """Bytes of one packed vector of `size` values."""
    return size * itemsize + 4


def _word(dtype: jnp.dtype) -> jnp.dtype:
    return jnp.dtype("uint32" if jnp.dtype(dtype).itemsize == 4 else "uint16")
