"""What a step of the program takes and what it gives: the arrays of a batch, and of its output."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.strategies import Step
from jaxpar.vocabulary.sampling import SamplingArrays


class StepBatch(NamedTuple):
    """What a step works on; B lanes of all replicas, T new tokens a lane.

    Over pp each stage has a batch of its own, and B counts the lanes of all stages, one stage after the other.

    `tokens`, `positions` [B, T] (position -1: padding, at the end of what a rank has); in prefill a rank of cp has T/cp
    of them side by side. `start` [B, cp] tokens that each rank has stored so far; `table` [B, W] page ids, -1 for none;
    `last` [B] which of the T tokens the next one follows; `options` [B] each.
    """

    tokens: Any
    positions: Any
    start: Any
    table: Any
    last: Any
    options: Any


class StepOutput(NamedTuple):
    """`token` and `logprob` [B], the same on every rank of a stage; or `logits` [B, T, V padded].

    Over pp those of the last stage's lanes, which come last, mean something, and no others.

    Of each rank that dispatches tokens of its own, `loads` [ranks, MoE layers, E] are the choices that each expert got
    of them, None without experts, and `dropped` [ranks] the rows that the plan's `moe_capacity` had no room for, None
    where nothing is dropped.
    """

    token: Any
    logprob: Any
    logits: Any
    loads: Any
    dropped: Any


def batch_shapes(step: Step) -> StepBatch:
    """ShapeDtypeStructs of a batch of all stages and replicas."""
    plan, lanes, ranks = step.plan, step.lanes * step.ranks(step.plan.lanes), step.plan.mesh.cp

    def array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    tokens = array((lanes, step.tokens * (ranks if step.phase == "prefill" else 1)), jnp.int32)
    lane, real = array((lanes,), jnp.int32), array((lanes,), jnp.float32)
    options = SamplingArrays(real, lane, real, array((lanes,), jnp.uint32), lane)
    table = array((lanes, -(-step.keys // plan.page_size)), jnp.int32)
    return StepBatch(tokens, tokens, array((lanes, ranks), jnp.int32), table, lane, options)
