"""What differs between the stages of a slot: whose layer it is, and whether there is one.

    slot        stage 0   stage 1   stage 2
    layer          0         4         -        `layers` = (0, 4, None): one for each pipeline stage
    weight      [ w0     ,  w4      ,  0     ]  a leading stage dimension, split over pp: each rank has its own

A stage without such a layer holds zeros, through which the residual stream passes as it is. Every rank runs the same
collectives; the products of a layer that it has not it skips (`pipeline/present.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxpar.collectives import rank_index
from jaxpar.nn.weights import Source
from jaxpar.pipeline.stages import Layers

Prefixes = tuple[str | None, ...]
"""What the names of such layers' tensors start with."""


def prefixes_of(layers: Layers, part: str = "") -> Prefixes:
    """`model.layers.N.` and the name of a part of the layer."""
    return tuple(None if layer is None else f"model.layers.{layer}.{part}" for layer in layers)


def with_part(prefixes: Prefixes, part: str) -> Prefixes:
    """Each prefix with the name of a part after it."""
    return tuple(None if prefix is None else prefix + part for prefix in prefixes)


def presence(prefixes: Prefixes) -> tuple[bool, ...]:
    """Whether each stage has such a layer."""
    return tuple(prefix is not None for prefix in prefixes)


def by_stage(prefixes: Prefixes, source: Callable[[str], Source]) -> tuple[Source, ...]:
    """Where each stage's part of a weight comes from: what `source` says of its prefix, zeros where it has none."""
    empty = source(next(prefix for prefix in prefixes if prefix is not None)).empty
    return tuple(empty if prefix is None else source(prefix) for prefix in prefixes)


def own_value(values: tuple[int, ...], axes: tuple[str, ...]) -> jax.Array | int:
    """This rank's of one value a stage, `axes` being those of the stages; of equal ones that value itself."""
    return values[0] if len(set(values)) == 1 else jnp.asarray(values)[rank_index(axes)]
