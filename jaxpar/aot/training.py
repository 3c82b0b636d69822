"""A training step for accelerators that need not be there, with abstract weights."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.aot.targets import Target
from jaxpar.checkpoint.config import ModelConfig
from jaxpar.plan import Plan
from jaxpar.train.settings import TrainSettings
from jaxpar.train.step import TrainPrograms


def training_programs(config: ModelConfig, plan: Plan, target: Target, batch: int, length: int) -> TrainPrograms:
    """Those of a run with `batch` sequences of `length` tokens a step.

    Raises:
        PlanError: a plan by which the model cannot be trained.
    """
    return TrainPrograms(config, plan, target.mesh(plan.mesh), TrainSettings(1, batch, length, 1e-3, 0, 1))


def lowered_step(train: TrainPrograms) -> jax.stages.Lowered:
    """A step that is ready to be compiled."""
    tokens = jax.ShapeDtypeStruct((train.settings.batch, train.settings.length + 1), jnp.int32)
    shardings = train.programs.sharded((train.state_specs, train.batch_spec))
    lowered: jax.stages.Lowered = train.step.lower(*jax.tree.map(_placed, (train.abstract_state, tokens), shardings))
    return lowered


def _placed(shape: jax.ShapeDtypeStruct, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
