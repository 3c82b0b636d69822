"""The map from experts to slots that hold them: data beside the weights, so that a new placement compiles nothing."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxpar.moe.balance import pick_copy
from jaxpar.moe.placement import most_copies
from jaxpar.plan import Plan


class Table(nnx.Variable[Any]):
    """An int32 array of the model that no checkpoint has, with its PartitionSpec (`spec`): the same on every rank."""

    @property
    def abstract(self) -> jax.ShapeDtypeStruct:
        """Its global shape and dtype, before values are put into it."""
        shape: jax.ShapeDtypeStruct = self.get_value()
        return shape


class ExpertMap(nnx.Module):
    """`moe.placement.SlotMap` of each pipeline stage: `slots_of` [1, E, C] and `copies` [1, E] in the local view."""

    def __init__(self, experts: int, plan: Plan, stages: int) -> None:
        """Declare the map of so many experts to the plan's slots."""

        def table(*shape: int) -> Table:
            return Table(jax.ShapeDtypeStruct((stages, *shape), jnp.int32), spec=P(plan.pipeline or None))

        self.slots_of = table(experts, most_copies(experts, plan.expert_slots))
        self.copies = table(experts)

    def __call__(self, experts: jax.Array, tokens: jax.Array) -> jax.Array:
        """The choices [R, k] of tokens with these numbers [R] -> the slots [R, k] of one copy of each."""
        copy = pick_copy(tokens[:, None], self.copies[0][experts])
        slots: jax.Array = self.slots_of[0][experts, copy]
        return slots
