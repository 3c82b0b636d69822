"""The attention of a step: a strategy with what it prepared once for all layers, under the scope that names it."""

from __future__ import annotations

from collections.abc import Callable

import jax

from jaxpar.attention.decode.overlap import in_parts
from jaxpar.attention.inputs import Inputs
from jaxpar.plan import Phase, Plan
from jaxpar.strategies import Strategy


def bound(
    strategy: Strategy, q_positions: jax.Array, k_positions: jax.Array, plan: Plan, phase: Phase
) -> Callable[[Inputs], jax.Array]:
    """A step's attention as its layers call it: what serves all layers is prepared here, once."""
    scope = f"{strategy.sublayer}:{strategy.name}"
    prepared = None
    if strategy.prepare is not None:
        with jax.named_scope(scope):
            prepared = strategy.prepare(q_positions, k_positions, plan)

    def attention(x: Inputs) -> jax.Array:
        with jax.named_scope(scope):
            parts = plan.decode_overlap if phase == "decode" and plan.sequence else 1
            return in_parts(lambda part: strategy.run(part, plan, prepared), x, parts)

    return attention
