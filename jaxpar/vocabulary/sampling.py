"""`vocab_parallel` sampling: the next token from logits that stay split over tp.

Greedy: each rank's best logit, then a maximum over ranks and the lowest id that reaches it. Drawn: Gumbel noise is
added to logits / temperature and the same maximum taken; the noise of a vocabulary id is a hash of (seed, position,
id) alone, so it is bit-equal on any sharding, lane and batch. Top-k and top-p keep the logits above a threshold that
all ranks find together, eight rounds of four bits: what crosses the mesh is [B, 15] counts a round, never the logits.

    logits  | V/tp | V/tp | V/tp | V/tp |      round i: how much weight lies at or above each of 15 candidates?
    tp rank     0      1      2      3         all-reduce [B, 15]; keep the highest candidate that has enough
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.collectives import all_max, all_min
from jaxpar.collectives.fixed_order import reduction_of
from jaxpar.fixed import by_row
from jaxpar.ledger.traffic import Traffic
from jaxpar.strategies import Step, Strategy
from jaxpar.vocabulary.head import vocabulary_ids

_ROUNDS, _BITS = 8, 4
_CANDIDATES = (1 << _BITS) - 1


class SamplingArrays(NamedTuple):
    """Sampling options of the lanes, each [B].

    `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 keep everything; `seed` uint32; `position` is that of the token
    to be drawn.
    """

    temperature: Any
    top_k: Any
    top_p: Any
    seed: Any
    position: Any


class Sampled(NamedTuple):
    """The chosen token [B] and its log-probability [B] under the model's own distribution (temperature 1)."""

    token: jax.Array
    logprob: jax.Array


def sample(
    logits: jax.Array,
    vocab_size: int,
    axes: tuple[str, ...],
    options: SamplingArrays,
    sampled: bool,
    fixed: bool = False,
) -> Sampled:
    """Choose a token for each lane.

    Args:
        logits: [B, V/tp] float32 of this rank, -inf at or above `vocab_size`.
        vocab_size: without padding.
        axes: those over which the vocabulary is split.
        options: of each lane; read only when `sampled`.
        sampled: whether any lane is drawn; without it the program is greedy and holds no noise.
        fixed: sums in an order that does not depend on how many lanes there are.
    """
    with jax.named_scope("sampling:vocab_parallel"):
        ids = vocabulary_ids(logits.shape[1], axes)
        top = all_max(logits.max(axis=1), axes)
        scores = logits
        if sampled:
            scores = _perturbed(logits, top, ids, axes, options, fixed)
            best = all_max(scores.max(axis=1), axes)
        else:
            best = top
        # Ties go to the lowest id on every mesh.
        winners = jnp.where(scores == best[:, None], ids[None, :], jnp.int32(vocab_size))
        token = all_min(winners.min(axis=1), axes)
        # One all-reduce carries both: the softmax denominator and the chosen logit, which one rank knows.
        chosen = jnp.where(ids[None, :] == token[:, None], logits - top[:, None], 0.0).sum(axis=1)
        total = by_row(lambda x, top: jnp.exp(x - top[:, None]).sum(axis=1), logits, top, fixed=fixed)
        sums = reduction_of(fixed).all_reduce(jnp.stack([total, chosen]), axes)
        return Sampled(token, by_row(lambda chosen, total: chosen - jnp.log(total), sums[1], sums[0], fixed=fixed))


def _perturbed(
    logits: jax.Array, top: jax.Array, ids: jax.Array, axes: tuple[str, ...], options: SamplingArrays, fixed: bool
) -> jax.Array:
    """Scores whose maximum is a draw: filtered logits / temperature + Gumbel noise; greedy lanes keep their logits."""
    drawn = options.temperature > 0
    scaled = (logits - top[:, None]) / jnp.where(drawn, options.temperature, 1.0)[:, None]
    order = _sortable(scaled)
    vocabulary = jnp.int32(jnp.iinfo(jnp.int32).max)
    wanted = jnp.where(options.top_k > 0, options.top_k, vocabulary).astype(jnp.float32)
    threshold = _threshold(order, jnp.ones_like(scaled), wanted, axes, fixed)
    kept = order >= threshold[:, None]

    def of_lanes(kept: jax.Array, scaled: jax.Array) -> tuple[jax.Array, jax.Array]:
        mass = jnp.where(kept, jnp.exp(scaled), 0.0)
        return mass, mass.sum(axis=1)

    mass, total = by_row(of_lanes, kept, scaled, fixed=fixed)
    total = reduction_of(fixed).all_reduce(total, axes)
    # The nucleus: the fewest best tokens whose probability reaches top_p (arXiv:1904.09751).
    threshold = _threshold(order, mass, jnp.where(options.top_p < 1.0, options.top_p * total, jnp.inf), axes, fixed)
    kept = kept & (order >= threshold[:, None])
    noise = by_row(
        lambda seed, position: gumbel_noise(seed, position, ids), options.seed, options.position, fixed=fixed
    )
    noisy = jnp.where(kept, scaled + noise, -jnp.inf)
    return jnp.where(drawn[:, None], noisy, logits)


def _at_or_above(order: jax.Array, weight: jax.Array, candidates: jax.Array) -> jax.Array:
    """The weight [B, 15] that lies at or above each candidate [B, 15]."""
    above = [jnp.where(order >= candidates[:, i, None], weight, 0.0).sum(axis=1) for i in range(_CANDIDATES)]
    return jnp.stack(above, axis=1)


def _sortable(x: jax.Array) -> jax.Array:
    """float32 -> uint32 in the same order; -0 and 0 are one value."""
    # Not x + 0.0: XLA takes that for x.
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _threshold(order: jax.Array, weight: jax.Array, wanted: jax.Array, axes: tuple[str, ...], fixed: bool) -> jax.Array:
    """The highest threshold [B] for which the weights [B, V/tp] with order >= threshold sum to `wanted` [B] or more.

    0 (everything is kept) where all of them sum to less.
    """

    def round_(threshold: jax.Array, shift: jax.Array) -> tuple[jax.Array, None]:
        steps = jnp.arange(1, _CANDIDATES + 1, dtype=jnp.uint32)
        candidates = threshold[:, None] | (steps[None, :] << shift)
        sums = reduction_of(fixed).all_reduce(by_row(_at_or_above, order, weight, candidates, fixed=fixed), axes)
        # Sums fall as candidates rise, so the number that reach `wanted` names the highest of them.
        reached = (sums >= wanted[:, None]).sum(axis=1).astype(jnp.uint32)
        return threshold | (reached << shift), None

    shifts = jnp.arange(_ROUNDS - 1, -1, -1, dtype=jnp.uint32) * _BITS
    start = (wanted * 0).astype(jnp.uint32)
    return lax.scan(round_, start, shifts)[0]


def gumbel_noise(seed: jax.Array, position: jax.Array, ids: jax.Array) -> jax.Array:
    """Standard Gumbel noise [B, V]: a threefry hash of (seed [B], position [B], id [V]) and nothing else."""

    def lane(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
        hashed = jax.vmap(lambda i: jax.random.key_data(jax.random.fold_in(key, i))[0])(ids)
        return (hashed >> 9).astype(jnp.float32)

    # 23 bits: with one more, adding a half would round the largest up to 1, whose noise is infinite.
    uniform = (jax.vmap(lane)(seed, position) + 0.5) * jnp.float32(2.0**-23)
    return -jnp.log(-jnp.log(uniform))


def traffic(step: Step) -> list[Traffic]:
    """Greedy: two all-reduces of [B] and one of [2, B]; drawn: two more of [B] and 16 of [B, 15]."""
    axes = step.plan.width
    if not axes or step.logits:
        return []
    value = step.lanes * 4
    sums = {2 * value: 1, **({value: 1, _CANDIDATES * value: 2 * _ROUNDS} if step.sampled else {})}
    scope, of_sums = ("sampling", "vocab_parallel"), "all_gather" if step.plan.fixed_order else "all_reduce"
    return [
        step.sends(scope, "all_reduce", axes, 3 if step.sampled else 2, value),
        *(step.sends(scope, of_sums, axes, calls, size) for size, calls in sums.items()),
    ]


def check(step: Step) -> str | None:
    """Any vocabulary: padded ids are -inf."""
    return None


STRATEGY = Strategy(
    "vocab_parallel", "sampling", ("tp",), ("all_reduce", "all_gather"), "any vocabulary", sample, traffic, check
)
