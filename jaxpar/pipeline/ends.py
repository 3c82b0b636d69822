"""What only the first or only the last stage of a pipeline does, in a program that all stages run.

stage 0          its rows are the embedded tokens of its batch, those of other stages what was passed on to them
the last stage   the vocabulary head: no rank sends anything for it, so that the others may leave it out
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxpar.collectives import rank_index, to_varying
from jaxpar.pipeline.present import on_stages
from jaxpar.plan import Plan


def entering(flow: jax.Array, embedded: jax.Array, plan: Plan) -> jax.Array:
    """The residual rows [R, D] that a stage begins a tick with: embedded tokens on stage 0, elsewhere `flow`."""
    return jnp.where(rank_index(plan.pipeline) == 0, to_varying(embedded, plan.pipeline), flow)


def on_last_stage(function: Callable[[jax.Array], jax.Array], x: jax.Array, plan: Plan) -> jax.Array:
    """What `function`, which sends nothing, makes of `x` on the last stage; zeros of that shape on the others."""
    is_last = (*[False] * (plan.mesh.pp - 1), True)
    return on_stages(is_last, plan.pipeline, lambda: function(x))
