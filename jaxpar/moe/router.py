"""Which experts a token goes to, and with what weights.

    logits = x W^T (+ bias)  ->  scores  ->  choice (+ correction bias, groups masked)  ->  top k  ->  weights

The choice is the same on every rank that has the token, as long as the tokens are: ties go to the lowest expert.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.checkpoint.config import RouterConfig

_TINY = 1e-20
"""Keeps a sum of weights from being 0, as DeepSeek-V3 has it; next to any other sum it vanishes."""


class Routing(NamedTuple):
    """Of each token the experts that it goes to, best first, and their weights: [T, k] int32 and [T, k] float32.

    `scores` [T, E] float32 are those of all experts, before groups and corrections.
    """

    experts: jax.Array
    weights: jax.Array
    scores: jax.Array


def route(x: jax.Array, weight: jax.Array, bias: jax.Array | None, router: RouterConfig) -> Routing:
    """Route tokens [T, D] by a router's `weight` [E, D] and, where `router.bias` says to what it is added, `bias` [E].

    Scores are float32 whatever the dtypes are. Works on whole arrays, and on a rank's tokens under shard_map.
    """
    with jax.named_scope("router"):
        logits = lax.dot_general(
            x.astype(jnp.float32), weight.astype(jnp.float32), (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST
        )
        assert (bias is None) == (router.bias is None)
        offset = 0.0 if bias is None else bias.astype(jnp.float32)[None, :]
        if router.bias == "logits":
            logits = logits + offset
        scores = jax.nn.softmax(logits) if router.scoring == "softmax" else jax.nn.sigmoid(logits)
        choice = scores + offset if router.bias == "choice" else scores
        if router.topk_group < router.n_group:
            choice = _best_groups(choice, router)
        _, experts = lax.top_k(choice, router.top_k)
        weights = jnp.take_along_axis(scores, experts, axis=1)
        if router.norm_topk_prob:
            weights = weights / (weights.sum(axis=1, keepdims=True) + _TINY)
        return Routing(experts, weights * router.routed_scaling_factor, scores)


def _best_groups(choice: jax.Array, router: RouterConfig) -> jax.Array:
    """The same scores [T, E], with -inf for experts outside the best `topk_group` groups of neighbours."""
    tokens, experts = choice.shape
    grouped = choice.reshape(tokens, router.n_group, experts // router.n_group)
    best = lax.top_k(grouped, 1 if router.group_score == "max" else 2)[0].sum(axis=-1)
    _, kept = lax.top_k(best, router.topk_group)
    is_kept = (kept[:, :, None] == jnp.arange(router.n_group)[None, None, :]).any(axis=1)
    return jnp.where(is_kept[:, :, None], grouped, -jnp.inf).reshape(tokens, experts)
