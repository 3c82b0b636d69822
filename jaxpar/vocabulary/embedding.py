"""`vocab_parallel` embedding: each rank holds a slice of the rows and looks up the ids that are its own.

ids 7 2 9        rank 0 (rows 0..4): -  e2  -          sum over tp: e7 e2 e9
rank 1 (rows 5..9): e7 -   e9         (Megatron-LM, arXiv:1909.08053)
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpar.collectives import leave, rank_index
from jaxpar.collectives.reduction import leave_traffic
from jaxpar.ledger.traffic import Traffic
from jaxpar.plan import Sublayer
from jaxpar.strategies import Step, Strategy


def rank_offset(rows: int, axes: tuple[str, ...]) -> jax.Array | int:
    """The first vocabulary id of this rank, which holds `rows` of them."""
    return rank_index(axes) * rows


def embed(ids: jax.Array, table: jax.Array, sublayer: Sublayer) -> jax.Array:
    """Ids [T] and the rank's rows [V/tp, D] -> embedded tokens [T, D], or this rank's slice of them."""
    axes = sublayer.scatter + sublayer.sum
    if not axes:
        return table[ids]
    with jax.named_scope("embedding:vocab_parallel"):
        local = ids - rank_offset(table.shape[0], axes)
        mine = (local >= 0) & (local < table.shape[0])
        rows = table[jnp.clip(local, 0, table.shape[0] - 1)]
        return leave(jnp.where(mine[:, None], rows, jnp.zeros((), rows.dtype)), sublayer)


def traffic(step: Step) -> list[Traffic]:
    """One all-reduce of [T, D], or one reduce-scatter where the residual stream is split over tp."""
    sublayer = step.plan.sublayer("vocabulary", step.phase)
    return leave_traffic(step, ("embedding", "vocab_parallel"), sublayer, step.rows, 1)


def check(step: Step) -> str | None:
    """Any vocabulary: rows that do not divide are padded."""
    return None


STRATEGY = Strategy(
    "vocab_parallel",
    "embedding",
    ("tp",),
    ("all_reduce", "reduce_scatter"),
    "any vocabulary (rows padded)",
    embed,
    traffic,
    check,
    backward=traffic,
)
