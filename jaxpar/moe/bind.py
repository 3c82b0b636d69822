"""The dispatch of a step: a strategy as MoE layers call it, under the scope that names it."""

from __future__ import annotations

from collections.abc import Callable

import jax

from jaxpar.moe.inputs import Dispatched, Inputs
from jaxpar.plan import Plan
from jaxpar.strategies import Strategy


def bound(strategy: Strategy, plan: Plan, room: int = 0) -> Callable[[Inputs], Dispatched]:
    """Tokens and their routing -> the weighted sum of what their experts make of them; `room` is that of Step."""

    def dispatch(x: Inputs) -> Dispatched:
        with jax.named_scope(f"{strategy.sublayer}:{strategy.name}"):
            done: Dispatched = strategy.run(x._replace(room=room), plan)
            return done

    return dispatch
