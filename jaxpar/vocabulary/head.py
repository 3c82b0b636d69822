"""`vocab_parallel` head: each rank's logits of its own slice of the vocabulary, which stay where they are.

Padded rows are -inf, so that no argmax can choose them. Where the residual stream is split, the head first gathers the
tokens that it works on: of a prefill step that is the last token of each request, which one rank holds.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.collectives import enter, pick_rows
from jaxpar.collectives.reduction import enter_traffic
from jaxpar.kernels.dense import matmul
from jaxpar.ledger.traffic import Traffic
from jaxpar.plan import Sublayer
from jaxpar.strategies import Step, Strategy
from jaxpar.vocabulary.embedding import rank_offset


def vocabulary_ids(rows: int, axes: tuple[str, ...]) -> jax.Array:
    """The ids [V/tp] of this rank's slice, padded ones at or above the vocabulary's size."""
    return jnp.arange(rows, dtype=jnp.int32) + rank_offset(rows, axes)


def last_tokens(x: jax.Array, last: jax.Array, tokens: int, sublayer: Sublayer, axes: tuple[str, ...]) -> jax.Array:
    """The hidden state of one token of each lane [B, D], on every rank.

    Args:
        x: the rank's slice of the residual stream.
        last: [B] which token of the lane, counted over all ranks that share the sequence.
        tokens: of a lane on each of those ranks.
        sublayer: how the head enters.
        axes: those over which a replica's residual stream is split.
    """
    with jax.named_scope("head:vocab_parallel"):
        # Ranks of tp share the rows of one rank of the sequence, with some of padding at the end.
        rows = x.shape[0] * (lax.axis_size(sublayer.gather) if sublayer.gather else 1)
        lanes = jnp.arange(last.shape[0], dtype=jnp.int32)
        return pick_rows(x, last // tokens * rows + lanes * tokens + last % tokens, axes)


def all_tokens(x: jax.Array, tokens: int, sublayer: Sublayer) -> jax.Array:
    """The hidden states of all `tokens` tokens [T, D] that the ranks of tp share, on each of them."""
    with jax.named_scope("head:vocab_parallel"):
        return enter(x, sublayer, tokens)


def local_logits(
    x: jax.Array, table: jax.Array, vocab_size: int, axes: tuple[str, ...], fixed: bool = False
) -> jax.Array:
    """Hidden states [T, D] and the rank's rows [V/tp, D] -> its logits [T, V/tp] in float32; `fixed` as in `matmul`."""
    with jax.named_scope("head:vocab_parallel"):
        logits = matmul(x, table, fixed)
        real = vocabulary_ids(table.shape[0], axes) < vocab_size
        return jnp.where(real[None, :], logits, -jnp.inf)


def traffic(step: Step) -> list[Traffic]:
    """The tokens that the head works on, where the residual stream is split; sampling works on the split logits."""
    scope, axes = ("head", "vocab_parallel"), step.plan.slices(step.phase)
    if step.logits:
        return enter_traffic(step, scope, step.plan.sublayer("vocabulary", step.phase), 1)
    if not axes:
        return []
    return [step.sends(scope, "all_reduce", axes, 1, step.lanes * step.row_bytes)]


def check(step: Step) -> str | None:
    """Any vocabulary: rows that do not divide are padded."""
    return None


STRATEGY = Strategy(
    "vocab_parallel",
    "head",
    ("cp", "tp"),
    ("all_reduce", "all_gather"),
    "any vocabulary (rows padded)",
    local_logits,
    traffic,
    check,
)
