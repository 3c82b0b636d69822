"""`vocab_parallel` loss: cross-entropy on logits that stay split over tp (Megatron-LM, arXiv:1909.08053).

logits  | V/tp | V/tp | V/tp | V/tp |    maximum over tp of [N]
tp rank     0      1      2      3       sum over tp of [2, N]: softmax denominator, the target's logit (one rank's)
                                         mean over dp and ep
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.collectives import all_max, all_sum
from jaxpar.ledger.traffic import Traffic
from jaxpar.strategies import Step, Strategy
from jaxpar.vocabulary.head import vocabulary_ids


def cross_entropy(logits: jax.Array, targets: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Negative log-likelihood [N] in nats of each token's target, the same on every rank of `axes`.

    Args:
        logits: [N, V/tp] float32 of this rank, -inf at padded ids.
        targets: [N] vocabulary ids.
        axes: those over which the vocabulary is split.
    """
    with jax.named_scope("loss:vocab_parallel"):
        # The maximum only keeps exp from overflowing: the loss does not depend on it, and neither does its gradient.
        top = all_max(lax.stop_gradient(logits).max(axis=1), axes)
        shifted = logits - top[:, None]
        ids = vocabulary_ids(logits.shape[1], axes)
        target = jnp.where(ids[None, :] == targets[:, None], shifted, 0.0).sum(axis=1)
        sums = all_sum(jnp.stack([jnp.exp(shifted).sum(axis=1), target]), axes)
        return jnp.log(sums[0]) - sums[1]


def mean_loss(losses: jax.Array, axes: tuple[str, ...], ranks: int) -> jax.Array:
    """The mean over the tokens of all `ranks` ranks of `axes`, each of which has as many."""
    with jax.named_scope("loss:vocab_parallel"):
        return all_sum(losses.mean() / ranks, axes)


def traffic(step: Step) -> list[Traffic]:
    """All-reduces of [N] and [2, N] float32 over tp and of one over dp and ep, forward; backward nothing is sent."""
    width, requests, value = step.plan.width, step.plan.requests, 4
    messages = [(width, step.rows * value), (width, 2 * step.rows * value), (requests, value)]
    scope = ("loss", "vocab_parallel")
    return [step.sends(scope, "all_reduce", axes, 1, size) for axes, size in messages if axes]


def check(step: Step) -> str | None:
    """Any vocabulary: padded ids are -inf."""
    return None


STRATEGY = Strategy(
    "vocab_parallel", "loss", ("dp", "ep", "tp"), ("all_reduce",), "any vocabulary", cross_entropy, traffic, check
)
