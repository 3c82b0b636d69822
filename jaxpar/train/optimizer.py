"""AdamW with warm-up and cosine decay, on a rank's slices of the weights.

Every update is elementwise, so that slices are updated as they are and replicas stay equal. The one value that needs
all of a gradient, its norm, comes from `sum_gradients`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
from jax.sharding import PartitionSpec as P

from jaxpar.nn.weights import Weight
from jaxpar.train.settings import TrainSettings

CLIP_NORM = 1.0
"""Gradients whose global 2-norm is larger are scaled down to it (arXiv:1211.5063)."""
BETA1, BETA2, WEIGHT_DECAY = 0.9, 0.95, 0.1
WARMUP_SHARE, FINAL_SHARE = 0.05, 0.05
"""Of the steps and of the highest learning rate."""

Arrays = dict[str, Any]


class Optimizer:
    """AdamW (arXiv:1711.05101); matrices decay, norms and biases do not. States are optax's, with moments by name."""

    def __init__(self, settings: TrainSettings, weights: Mapping[str, Weight]) -> None:
        """Plan the learning rate over `settings.steps`."""
        schedule = optax.warmup_cosine_decay_schedule(
            init_value=0.0,
            peak_value=settings.learning_rate,
            warmup_steps=max(1, round(settings.steps * WARMUP_SHARE)),
            decay_steps=max(2, settings.steps),
            end_value=settings.learning_rate * FINAL_SHARE,
        )
        decays = {name: len(weight.sources[0].shape) > 1 for name, weight in weights.items()}
        self._adamw = optax.adamw(schedule, b1=BETA1, b2=BETA2, weight_decay=WEIGHT_DECAY, mask=decays)

    def init(self, weights: Arrays) -> Any:
        """The state before the first step."""
        return self._adamw.init(weights)

    def specs(self, weights: Arrays, weight_specs: Mapping[str, P]) -> Any:
        """PartitionSpecs of the state: moments as the weights, the number of steps replicated."""
        abstract = jax.eval_shape(self._adamw.init, weights)
        return optax.tree_map_params(
            self._adamw, lambda _, spec: spec, abstract, weight_specs, transform_non_params=lambda _: P()
        )

    def update(self, gradients: Arrays, norm: jax.Array, state: Any, weights: Arrays) -> tuple[Arrays, Any]:
        """One step with gradients of global 2-norm `norm` -> the weights and the state after it."""
        scale = jnp.where(norm > CLIP_NORM, CLIP_NORM / norm, 1.0)
        updates, state = self._adamw.update(
            {name: gradient * scale for name, gradient in gradients.items()}, state, weights
        )
        return optax.apply_updates(weights, updates), state

    def moments(self, state: Any) -> tuple[Arrays, Arrays]:
        """The first and second moments of the gradients, laid out like the weights."""
        return optax.tree.get(state, "mu"), optax.tree.get(state, "nu")

    def restore(self, fresh: Any, mu: Arrays, nu: Arrays, steps: int) -> Any:
        """The state after `steps` steps in the place of a fresh one, which counts them more than once."""

        def count(zero: jax.Array) -> jax.Array:
            return jax.device_put(np.asarray(steps, zero.dtype), zero.sharding)

        state = optax.tree_map_params(self._adamw, lambda moment: moment, fresh, transform_non_params=count)
        return optax.tree.set(state, mu=mu, nu=nu)
