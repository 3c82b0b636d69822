"""What a training run is made of, apart from its text, its model and its mesh."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxpar.errors import RequestError


@dataclass(frozen=True)
class TrainSettings:
    """A run of `steps` of `batch` sequences of `length` tokens each.

    `learning_rate` is the highest one; `seed` fixes the first weights and the order of the text. Every
    `checkpoint_every` steps the validation loss is taken and a checkpoint written. `aux_loss_coef` weighs the losses
    that balance experts (router_aux_loss_coef in Hugging Face configurations); a dense model has none.

    Raises:
        RequestError: a value out of its range.
    """

    steps: int
    batch: int
    length: int
    learning_rate: float
    seed: int
    checkpoint_every: int
    aux_loss_coef: float = 0.001

    def __post_init__(self) -> None:
        """Refuse what cannot be trained, before anything is read or compiled."""
        for name in ("steps", "batch", "length", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise RequestError(f"{name}={getattr(self, name)}: it must be at least 1")
        if not 0 < self.learning_rate < 1:
            raise RequestError(f"learning_rate={self.learning_rate}: it must be above 0 and below 1, such as 0.002")
        if not 0 <= self.aux_loss_coef < math.inf:
            raise RequestError(f"aux_loss_coef={self.aux_loss_coef}: it must be 0 (no balance) or above, such as 0.001")
        if not 0 <= self.seed < 2**32:
            raise RequestError(f"seed={self.seed}: it must be from 0 to {2**32 - 1}")
