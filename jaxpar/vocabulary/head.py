"""Logits of a rank's slice of the vocabulary; padded rows are -inf, so that no argmax can choose them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.vocabulary.embedding import rank_offset


def vocabulary_ids(rows: int, axes: tuple[str, ...]) -> jax.Array:
    """The ids [V/tp] of this rank's slice, padded ones at or above the vocabulary's size."""
    return jnp.arange(rows, dtype=jnp.int32) + rank_offset(rows, axes)


def local_logits(x: jax.Array, table: jax.Array, vocab_size: int, axes: tuple[str, ...]) -> jax.Array:
    """Hidden states [T, D] and the rank's rows [V/tp, D] -> its logits [T, V/tp] in float32."""
    with jax.named_scope("head"):
        logits = lax.dot_general(x, table, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        real = vocabulary_ids(table.shape[0], axes) < vocab_size
        return jnp.where(real[None, :], logits, -jnp.inf)
