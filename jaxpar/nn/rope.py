"""Rotary position embedding (arXiv:2104.09864) and the ways in which it is stretched to longer contexts."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpar.checkpoint.config import RopeConfig
from jaxpar.fixed import by_row


def frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Angles per position of each pair, [head_dim / 2] float32, and the factor on cos and sin."""
    base = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    scale = 1.0
    if rope.rope_type == "linear":
        base = base / rope.factor
    elif rope.rope_type == "llama3":
        base = _llama3(base, rope)
    elif rope.rope_type == "yarn":
        base = _yarn(base, rope, head_dim)
        scale = _yarn_scale(rope)
    return base.astype(np.float32), scale


def _llama3(base: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Long waves are stretched by `factor`, short ones kept, those between blended (Llama 3.1)."""
    wavelengths = 2 * math.pi / base
    low, high = rope.low_freq_factor, rope.high_freq_factor
    blend = np.clip((rope.original_max_position_embeddings / wavelengths - low) / (high - low), 0.0, 1.0)
    return np.asarray((1 - blend) * base / rope.factor + blend * base)


def _yarn(base: np.ndarray, rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Pairs that turn often within the original context are kept, the others stretched (YaRN, arXiv:2309.00071)."""

    def pair_that_turns(times: float) -> float:
        context = rope.original_max_position_embeddings
        return head_dim * math.log(context / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - first) / max(last - first, 0.001), 0.0, 1.0)
    return np.asarray(ramp * base / rope.factor + (1 - ramp) * base)


def _yarn_scale(rope: RopeConfig) -> float:
    """YaRN's temperature, on cos and sin; DeepSeek's is the ratio of two mscales."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return rope.temperature(rope.mscale) / rope.temperature(rope.mscale_all_dim)
    return rope.temperature(1.0)


def angles(
    positions: jax.Array,
    rope: RopeConfig,
    head_dim: int,
    rank: jax.Array | int = 0,
    parts: int = 1,
    fixed: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of global positions [T] -> two [T, head_dim / 2] float32.

    Where ranks that follow one another have one of `parts` of the pairs each, those of `rank`: as many columns less.
    """
    base, scale = frequencies(rope, head_dim)
    mine = jnp.asarray(base)
    if parts > 1:
        pairs = len(base) // parts
        mine = lax.dynamic_slice_in_dim(mine, rank % parts * pairs, pairs)

    def of_rows(positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        turned = positions.astype(jnp.float32)[:, None] * mine[None, :]
        return jnp.cos(turned) * scale, jnp.sin(turned) * scale

    return by_row(of_rows, positions, fixed=fixed)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, interleaved: bool = False, fixed: bool = False) -> jax.Array:
    """Turn heads [T, H, d] by angles [T, d / 2]; pair i is dimensions i and i + d/2, as Hugging Face stores them.

    Where pairs are `interleaved`, pair i is dimensions 2i and 2i + 1. They come out as i and i + d/2 all the same: it
    does not change a product of two that are rotated.
    """

    def turn(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        first, second = (wide[..., ::2], wide[..., 1::2]) if interleaved else jnp.split(wide, 2, axis=-1)
        cos, sin = cos[:, None, :], sin[:, None, :]
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)

    return by_row(turn, x, cos, sin, fixed=fixed)
