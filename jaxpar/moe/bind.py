"""The dispatch of a step: a strategy as MoE layers call it, under the scope that names it."""

from __future__ import annotations

from collections.abc import Callable

import jax

from jaxpar.moe.inputs import Dispatched, Inputs
from jaxpar.strategies import Step, Strategy


def bound(strategy: Strategy, step: Step) -> Callable[[Inputs], Dispatched]:
    """Tokens and their routing -> the weighted sum of what their experts make of them, as `step` needs it."""

    def dispatch(x: Inputs) -> Dispatched:
        with jax.named_scope(f"{strategy.sublayer}:{strategy.name}"):
            x = x._replace(room=step.room, differentiable=step.differentiated, fixed=step.plan.fixed_order)
            done: Dispatched = strategy.run(x, step.plan)
            return done

    return dispatch
