"""What all layers of one step share, in the local view."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax

from jaxpar.attention.inputs import Inputs
from jaxpar.attention.store import KeyStore
from jaxpar.collectives.reduction import Reduction
from jaxpar.moe.inputs import Dispatched
from jaxpar.moe.inputs import Inputs as Routed
from jaxpar.plan import Phase, Plan


@dataclass(frozen=True)
class StepContext:
    """Values and chosen strategies of a step.

    `positions` [B, T] global positions of the step's tokens (-1: padding); `cos`, `sin` [B * T, pairs] of the
    rotary pairs that a rank has of a head, head_dim / 2 unless heads are split inside;
    `store` takes keys and values; `attention` is the plan's strategy, and wants a share of the query heads over
    `query_axes`; `dispatch` brings tokens to their experts and back; `reduction` adds partial results up.
    """

    plan: Plan
    phase: Phase
    positions: jax.Array
    cos: jax.Array
    sin: jax.Array
    store: KeyStore
    attention: Callable[[Inputs], jax.Array]
    query_axes: tuple[str, ...]
    dispatch: Callable[[Routed], Dispatched] | None
    reduction: Reduction
