"""`vocab_parallel` head: each rank's logits of its own slice of the vocabulary, which stay where they are.

Padded rows are -inf, so that no argmax can choose them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpar.ledger.traffic import Traffic
from jaxpar.nn.linear import matmul
from jaxpar.strategies import Step, Strategy
from jaxpar.vocabulary.embedding import rank_offset


def vocabulary_ids(rows: int, axes: tuple[str, ...]) -> jax.Array:
    """The ids [V/tp] of this rank's slice, padded ones at or above the vocabulary's size."""
    return jnp.arange(rows, dtype=jnp.int32) + rank_offset(rows, axes)


def local_logits(x: jax.Array, table: jax.Array, vocab_size: int, axes: tuple[str, ...]) -> jax.Array:
    """Hidden states [T, D] and the rank's rows [V/tp, D] -> its logits [T, V/tp] in float32."""
    with jax.named_scope("head:vocab_parallel"):
        logits = matmul(x, table)
        real = vocabulary_ids(table.shape[0], axes) < vocab_size
        return jnp.where(real[None, :], logits, -jnp.inf)


def traffic(step: Step) -> list[Traffic]:
    """Nothing: sampling works on the split logits."""
    return []


def check(step: Step) -> str | None:
    """Any vocabulary: rows that do not divide are padded."""
    return None


STRATEGY = Strategy("vocab_parallel", "head", ("tp",), (), "any vocabulary (rows padded)", local_logits, traffic, check)
