"""A Pallas kernel of JAX's own that does not say what it costs, made to say it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.extend.core import JaxprEqn, jaxpr_as_fun


def costed(function: Callable[..., jax.Array], cost: pl.CostEstimate, interpret: bool) -> Callable[..., jax.Array]:
    """`function`, whose one `pallas_call`, outside every jit, says that it costs `cost`.

    JAX's function has no argument for it. Without it XLA would count no FLOPs, and the ledger a loop whose trips nobody
    knows. `interpret`: as XLA operations, on any backend.
    """

    def told(equation: JaxprEqn) -> JaxprEqn:
        if equation.primitive.name != "pallas_call":
            return equation
        return equation.replace(params=equation.params | {"cost_estimate": cost, "interpret": interpret})

    def run(*operands: Any) -> jax.Array:
        program = jax.make_jaxpr(function)(*operands)
        equations = [told(equation) for equation in program.jaxpr.eqns]
        (out,) = jaxpr_as_fun(program.replace(jaxpr=program.jaxpr.replace(eqns=equations)))(*operands)
        found: jax.Array = out
        return found

    return run
