"""Positions of the other ranks' tokens and keys: gathered once a step, they serve all layers."""

from __future__ import annotations

import jax
from jax import lax

from jaxpar.collectives import all_gather
from jaxpar.ledger.traffic import Traffic
from jaxpar.plan import Plan
from jaxpar.strategies import Step


def of_every_rank(positions: jax.Array, plan: Plan) -> jax.Array:
    """This rank's positions [B, S] -> [cp, B, S] on every rank of cp."""
    return all_gather(positions[None], plan.sequence)


def of_rank(every: jax.Array, rank: jax.Array | int) -> jax.Array:
    """The positions [B, S] of one rank."""
    return lax.dynamic_index_in_dim(every, rank, keepdims=False)


def side_by_side(every: jax.Array) -> jax.Array:
    """[N, B, S] -> [B, N * S], rank by rank."""
    return every.transpose(1, 0, 2).reshape(every.shape[1], -1)


def gather_traffic(step: Step, strategy: str, *lengths: int) -> list[Traffic]:
    """What gathering positions of `lengths` per lane sends, once for all layers."""
    scope, axes = ("prefill_attention", strategy), step.plan.sequence
    return [step.sends(scope, "all_gather", axes, 1, step.lanes * length * 4) for length in lengths]
