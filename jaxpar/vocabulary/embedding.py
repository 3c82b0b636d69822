"""`vocab_parallel` embedding: each rank holds a slice of the rows and looks up the ids that are its own.

ids 7 2 9        rank 0 (rows 0..4): -  e2  -          sum over tp: e7 e2 e9
rank 1 (rows 5..9): e7 -   e9         (Megatron-LM, arXiv:1909.08053)
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.collectives import all_sum
from jaxpar.ledger.traffic import Traffic, all_reduce_bytes
from jaxpar.strategies import Step, Strategy


def rank_offset(rows: int, axes: tuple[str, ...]) -> jax.Array | int:
    """The first vocabulary id of this rank, which holds `rows` of them."""
    return lax.axis_index(axes) * rows if axes else 0


def embed(ids: jax.Array, table: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Ids [T] and the rank's rows [V/tp, D] -> embedded tokens [T, D] on every rank of `axes`."""
    if not axes:
        return table[ids]
    with jax.named_scope("embedding:vocab_parallel"):
        local = ids - rank_offset(table.shape[0], axes)
        mine = (local >= 0) & (local < table.shape[0])
        rows = table[jnp.clip(local, 0, table.shape[0] - 1)]
        return all_sum(jnp.where(mine[:, None], rows, jnp.zeros((), rows.dtype)), axes)


def traffic(step: Step) -> list[Traffic]:
    """One all-reduce of [T, D]."""
    axes = step.plan.width
    if not axes:
        return []
    message = step.rows * step.config.hidden_size * step.itemsize
    sent = all_reduce_bytes(message, step.ranks(axes))
    return [Traffic("embedding", "vocab_parallel", "all_reduce", axes, 1, message, sent)]


def check(step: Step) -> str | None:
    """Any vocabulary: rows that do not divide are padded."""
    return None


STRATEGY = Strategy(
    "vocab_parallel", "embedding", ("tp",), ("all_reduce",), "any vocabulary (rows padded)", embed, traffic, check
)
