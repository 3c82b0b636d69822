"""A partial result as one array, so that one collective carries its output and its LSE together."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.attention.partial import Partial


def pack(part: Partial, dtype: jnp.dtype) -> jax.Array:
    """Partial of [..., d] -> [..., d + 4 bytes] in `dtype`: the output rounded to it, the LSE float32 bit for bit."""
    lse = lax.bitcast_convert_type(part.lse[..., None], dtype)
    return jnp.concatenate([part.out.astype(dtype), lse.reshape(*part.lse.shape, -1)], axis=-1)


def unpack(packed: jax.Array) -> Partial:
    """What `pack` made, in float32."""
    values = 4 // packed.dtype.itemsize
    lse = packed[..., -values:]
    return Partial(
        packed[..., :-values].astype(jnp.float32),
        lax.bitcast_convert_type(lse if values > 1 else lse[..., 0], jnp.float32),
    )


def packed_bytes(size: int, itemsize: int) -> int:
    """Bytes of one packed vector of `size` values."""
    return size * itemsize + 4
