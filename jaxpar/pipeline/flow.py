"""The residual rows between stages, which a step takes from the one before it and leaves to the next.

tick t     stage 0   -> rows [R, D] ->   stage 1        they lie beside the cache, donated as it is; a step of other
tick t+1   stage 0   -> rows [R, D] ->   stage 1        width gets them cut or padded, lane by lane
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.attention.cache import Cache
from jaxpar.plan import Phase, Plan
from jaxpar.strategies import Step


class Flow:
    """Shapes and shardings of what all stages pass on, and the programs that change its width."""

    def __init__(self, plan: Plan, mesh: Mesh | AbstractMesh) -> None:
        """Nothing is compiled before the width changes; without stages nothing flows."""
        self._plan, self._mesh = plan, mesh
        # A program of its own, so that the step has one for each width and not for each pair of them.
        self._resize = lru_cache(maxsize=None)(self._resized_on_use)

    def into(self, cache: Cache, step: Step, fresh: bool) -> Cache:
        """The cache with as many rows between stages as a step takes, those that it has or `fresh` ones of zeros."""
        if not self._plan.pipeline:
            return cache
        shape, spec = self.shape(step), self.spec(step.phase)
        if fresh:
            zeros = np.zeros(shape.shape, shape.dtype)
            return cache._replace(flow=jax.device_put(zeros, NamedSharding(self._mesh, spec)))
        if cache.flow.shape == shape.shape:
            return cache
        return cache._replace(flow=self._resize(step.lanes, step.passed_rows, spec)(cache.flow))

    def shape(self, step: Step) -> jax.ShapeDtypeStruct:
        """Of the rows that all ranks together pass on in a tick."""
        rows = step.ranks(self._axes(step.phase)) * step.passed_rows
        return jax.ShapeDtypeStruct((rows, step.config.hidden_size), jnp.dtype(self._plan.dtype))

    def spec(self, phase: Phase) -> P:
        """Its PartitionSpec: those of the residual stream, of every stage."""
        return P(self._axes(phase), None)

    def _axes(self, phase: Phase) -> tuple[str, ...]:
        return self._plan.active(("pp", *self._plan.residual[phase]))

    def _resized_on_use(self, lanes: int, rows: int, spec: P) -> Any:
        local = partial(resized, lanes=lanes, count=rows)
        return jax.jit(jax.shard_map(local, mesh=self._mesh, in_specs=spec, out_specs=spec))


def resized(flow: jax.Array, lanes: int, count: int) -> jax.Array:
    """Rows [R, D] on their way as [`count`, D], lane by lane: padding at the end of each is cut off or added."""
    by_lane = flow.reshape(lanes, -1, flow.shape[1])[:, : count // lanes]
    missing = count // lanes - by_lane.shape[1]
    return jnp.pad(by_lane, ((0, 0), (0, missing), (0, 0))).reshape(count, -1)
