"""What only some stages of a pipeline do, in a program that all stages run.

slot 1       stage 0   stage 1   stage 2
layer           1         4         -         stage 2 has none there: it skips the products, and adds zeros
products       run       run      zeros       local: under a `cond`
all-reduce     run       run       run        sends: every stage runs it, or the mesh hangs
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpar.collectives import rank_index, to_varying, varying_axes
from jaxpar.ledger.trace import count_collectives
from jaxpar.plan import Plan

T = TypeVar("T")


def on_stages(present: Sequence[bool], pipeline: tuple[str, ...], function: Callable[[], T]) -> T:
    """What `function` gives on the stages of `pipeline` where `present` says so, zeros of that shape on the others.

    Where all stages are, and where `function` sends anything, every stage runs it. A cache plane that it writes would
    be copied: it may read them.
    """
    if all(present):
        return function()
    traced, made = jax.make_jaxpr(function, return_shape=True)()
    if count_collectives(traced):
        return function()
    types = jax.tree.unflatten(jax.tree.structure(made), traced.out_avals)

    def nothing() -> T:
        zeros: T = jax.tree.map(lambda x: to_varying(jnp.zeros(x.shape, x.dtype), sorted(varying_axes(x))), types)
        return zeros

    given: T = lax.cond(jnp.asarray(present)[rank_index(pipeline)], function, nothing)
    return given


def by_layer(of_slots: jax.Array, places: Sequence[tuple[int, int]], plan: Plan) -> jax.Array:
    """What a stage has counted in its slots [slots, N] -> [layers, N], zeros in the layers of other stages.

    Args:
        of_slots: in order, with whatever in slots that the stage has no layer in.
        places: the stage and the slot of each layer.
        plan: with stages.
    """
    layers = np.full((plan.mesh.pp, len(of_slots)), len(places), np.int32)
    for layer, (stage, slot) in enumerate(places):
        layers[stage, slot] = layer
    mine = jnp.asarray(layers)[rank_index(plan.pipeline)]
    return jnp.zeros((len(places), of_slots.shape[1]), of_slots.dtype).at[mine].set(of_slots, mode="drop")
