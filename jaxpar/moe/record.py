"""What one MoE layer did with a rank's tokens, for those who train, watch or balance it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.moe.router import Routing


class LayerRecord(NamedTuple):
    """Counts over the tokens of a rank that are no padding; every token has one rank that counts it.

    `loads` [E] int32 are the choices that each expert got; `scores` [E] float32 the sum of the router's scores, each
    token's as parts of 1; `dropped` an int32 of the rows for which `moe_capacity` had no room, None where there is no
    such bound.
    """

    loads: jax.Array
    scores: jax.Array
    dropped: jax.Array | None


def record(routing: Routing, real: jax.Array, dropped: jax.Array | None) -> LayerRecord:
    """Count the routing of tokens [R], those of which that are `real` [R] bool."""
    experts = routing.scores.shape[1]
    chosen = jnp.where(real[:, None], routing.experts, experts).reshape(-1)
    loads = jnp.bincount(chosen, length=experts).astype(jnp.int32)
    shares = routing.scores / routing.scores.sum(axis=1, keepdims=True)
    return LayerRecord(loads, jnp.where(real[:, None], shares, 0.0).sum(axis=0), dropped)


def added(records: Sequence[LayerRecord]) -> LayerRecord:
    """The record of a layer that took a rank's tokens in several batches."""
    together: LayerRecord = jax.tree.map(lambda *counts: sum(counts[1:], counts[0]), *records)
    return together


def all_loads(records: list[LayerRecord]) -> jax.Array | None:
    """Loads of all MoE layers [L, E]; None where there is none."""
    return jnp.stack([layer.loads for layer in records]) if records else None


def all_dropped(records: list[LayerRecord]) -> jax.Array | None:
    """Rows dropped in all layers; None where nothing can be."""
    counts = [layer.dropped for layer in records if layer.dropped is not None]
    return sum(counts[1:], counts[0]) if counts else None
