"""The next token from a split vocabulary: the same on every sharding, and drawn from the distribution asked for."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.devices import ensure_devices, make_mesh
from jaxpar.mesh import MeshSpec
from jaxpar.vocabulary.head import local_logits, vocabulary_ids
from jaxpar.vocabulary.sampling import Sampled, SamplingArrays, gumbel_noise, sample

VOCAB = 103
TP = (1, 2, 3, 4, 8)  # 103 is prime: all but one pad
LANES = 16
RNG = np.random.default_rng(0)
LOGITS = (3 * RNG.standard_normal((LANES, VOCAB)) - 20).astype(np.float32)  # all negative: 0 would win


@cache
def sampler(tp: int, vocab_size: int, sampled: bool) -> Any:
    """`sample` on a mesh of `tp` ranks; every rank's choice comes out, [tp, B]."""
    spec = MeshSpec(tp=tp)
    mesh, axes = make_mesh(spec, ensure_devices(spec)), spec.active(("tp",))

    def local(logits: jax.Array, options: SamplingArrays) -> Sampled:
        chosen = sample(logits, vocab_size, axes, options, sampled)
        return jax.tree.map(lambda x: jax.lax.pcast(x[None], axes, to="varying"), chosen)

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P(None, axes or None), P()), out_specs=P(axes or None)))


def choose(logits: np.ndarray, tp: int = 1, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [B] and log-probabilities [B], checked to be the same on every rank; greedy without options."""
    lanes, vocab = logits.shape
    padded = np.pad(logits, ((0, 0), (0, -vocab % tp)), constant_values=-np.inf)
    token, logprob = sampler(tp, vocab, bool(options))(padded, arrays(lanes, **options))
    assert (np.asarray(token) == np.asarray(token)[0]).all()
    assert (np.asarray(logprob) == np.asarray(logprob)[0]).all()
    return np.asarray(token)[0], np.asarray(logprob)[0]


def arrays(
    lanes: int, temperature: Any = 1.0, top_k: Any = 0, top_p: Any = 1.0, seed: Any = 0, position: Any = None
) -> SamplingArrays:
    def each(value: Any, dtype: type) -> np.ndarray:
        return np.broadcast_to(np.asarray(value, dtype), (lanes,))

    position = np.arange(lanes) if position is None else position
    return SamplingArrays(
        each(temperature, np.float32),
        each(top_k, np.int32),
        each(top_p, np.float32),
        each(seed, np.uint32),
        each(position, np.int32),
    )


def kept(logits: np.ndarray, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> np.ndarray:
    """Which ids [V] of one lane may be drawn: those as good as the k-th best, then of these the nucleus."""
    scaled = logits.astype(np.float64) / temperature
    order = np.sort(scaled)[::-1]
    keep = scaled >= order[min(top_k or len(order), len(order)) - 1]
    weights = np.where(keep, np.exp(scaled - order[0]), 0.0)
    if top_p < 1:
        best = np.argsort(-weights, kind="stable")
        last = best[np.searchsorted(np.cumsum(weights[best]), top_p * weights.sum())]
        keep &= weights >= weights[last]
    return keep


def probabilities(logits: np.ndarray, temperature: float = 1.0, **filters: Any) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) / temperature) * kept(logits, temperature, **filters)
    return weights / weights.sum()


def chi_square(tokens: np.ndarray, expected: np.ndarray) -> float:
    """Pearson's statistic over the ids that can be drawn."""
    counts, possible = np.bincount(tokens, minlength=len(expected)), expected > 0
    assert counts[~possible].sum() == 0
    mean = expected[possible] * len(tokens)
    return float(((counts[possible] - mean) ** 2 / mean).sum())


# Noise


@pytest.mark.parametrize("tp", TP)
def test_noise_is_bit_equal_on_every_sharding(tp: int) -> None:
    seeds, positions = np.arange(5, dtype=np.uint32) * 977, np.arange(5, dtype=np.int32) * 31
    whole = jax.jit(gumbel_noise)(seeds, positions, np.arange(VOCAB, dtype=np.int32))
    spec = MeshSpec(tp=tp)
    axes, rows = spec.active(("tp",)), -(-VOCAB // tp)
    split = jax.shard_map(
        lambda seeds, positions: gumbel_noise(seeds, positions, vocabulary_ids(rows, axes)),
        mesh=make_mesh(spec, ensure_devices(spec)),
        in_specs=P(),
        out_specs=P(None, axes or None),
    )
    np.testing.assert_array_equal(np.asarray(jax.jit(split)(seeds, positions))[:, :VOCAB], whole)


def test_noise_of_a_lane_is_that_of_its_seed_and_position_alone() -> None:
    noise, ids = jax.jit(gumbel_noise), np.arange(VOCAB, dtype=np.int32)
    seeds, positions = np.array([5, 6, 5], np.uint32), np.array([9, 9, 10], np.int32)
    together = np.asarray(noise(seeds, positions, ids))
    for lane in range(3):
        np.testing.assert_array_equal(together[lane], noise(seeds[lane : lane + 1], positions[lane : lane + 1], ids)[0])
    assert len({row.tobytes() for row in together}) == 3


def test_noise_is_finite_and_gumbel() -> None:
    positions = np.arange(400, dtype=np.int32)
    noise = np.asarray(jax.jit(gumbel_noise)(np.zeros(400, np.uint32), positions, np.arange(256, dtype=np.int32)))
    assert np.isfinite(noise).all()
    # Mean 0.5772 and variance pi^2 / 6; standard errors over 102,400 draws are 0.004 and 0.014.
    assert noise.mean() == pytest.approx(np.euler_gamma, abs=0.012)
    assert noise.var() == pytest.approx(np.pi**2 / 6, abs=0.05)


# Greedy


@pytest.mark.parametrize("tp", TP)
def test_greedy_takes_the_best_real_id_though_every_logit_is_below_that_of_padding_weights(tp: int) -> None:
    token, logprob = choose(LOGITS, tp)
    np.testing.assert_array_equal(token, LOGITS.argmax(axis=1))
    np.testing.assert_allclose(logprob, np.log(probabilities_of(LOGITS)[np.arange(LANES), token]), atol=1e-5)


@pytest.mark.parametrize("tp", TP)
def test_a_tie_goes_to_the_lowest_id_within_a_rank_and_between_ranks(tp: int) -> None:
    logits = np.full((4, VOCAB), -1.0, np.float32)
    logits[0, [102, 40, 77]] = 5.0
    logits[1, [3, 2]] = 5.0
    logits[2, [60, 99]] = 0.0, -0.0
    token, _ = choose(logits, tp)
    np.testing.assert_array_equal(token, [40, 2, 60, 0])


@pytest.mark.parametrize("vocab", [1, 2, 9])
def test_ranks_that_hold_padding_alone_are_never_chosen(vocab: int) -> None:
    logits = LOGITS[:, :vocab]
    np.testing.assert_array_equal(choose(logits, 8)[0], logits.argmax(axis=1))
    assert (choose(logits, 8, temperature=100.0)[0] < vocab).all()


def test_padded_rows_of_the_head_are_minus_infinity() -> None:
    spec = MeshSpec(tp=4)
    head = jax.shard_map(
        lambda x, table: local_logits(x, table, 5, ("tp",)),
        mesh=make_mesh(spec, ensure_devices(spec)),
        in_specs=(P(), P("tp", None)),
        out_specs=P(None, "tp"),
    )
    logits = np.asarray(jax.jit(head)(-np.ones((2, 3), np.float32), np.ones((8, 3), np.float32)))
    np.testing.assert_array_equal(logits, np.tile([[-3.0] * 5 + [-np.inf] * 3], (2, 1)))


# Drawn


def probabilities_of(logits: np.ndarray) -> np.ndarray:
    return np.stack([probabilities(row) for row in logits])


@pytest.mark.parametrize("tp", TP)
def test_a_draw_is_the_best_of_the_kept_logits_plus_noise_on_every_sharding(tp: int) -> None:
    options = [
        {"temperature": t, "top_k": k, "top_p": p}
        for t, k, p in itertools.product([0.5, 3.0], [0, 1, 7, VOCAB + 1], [1.0, 0.6])
    ]
    together = {name: [option[name] for option in options] for name in options[0]}
    seeds = np.arange(LANES, dtype=np.uint32)
    token, logprob = choose(LOGITS, tp, seed=seeds, **together)
    noise = np.asarray(gumbel_noise(jnp.asarray(seeds), jnp.arange(LANES), jnp.arange(VOCAB)))
    for lane, option in enumerate(options):
        scores = LOGITS[lane].astype(np.float64) / option["temperature"] + noise[lane]
        assert token[lane] == np.where(kept(LOGITS[lane], **option), scores, -np.inf).argmax(), option
    # Log-probabilities are those of the model, whatever is filtered.
    np.testing.assert_allclose(logprob, np.log(probabilities_of(LOGITS)[np.arange(LANES), token]), atol=1e-5)


def drawn_ids(logits: list[float], tp: int = 2, **options: Any) -> set[int]:
    """Every id that 512 draws give."""
    rows = np.tile(np.asarray([logits], np.float32), (512, 1))
    return set(choose(rows, tp, **options)[0].tolist())


def test_top_k_keeps_every_tie_at_its_threshold() -> None:
    assert drawn_ids([1.0, 3.0, 2.0, 2.0, 2.0, 0.0], top_k=2) == {1, 2, 3, 4}
    assert drawn_ids([1.0, 3.0, 2.0, 2.0, 2.0, 0.0], top_k=1) == {1}
    assert drawn_ids([0.0, -0.0, 0.0, -9.0, -9.0, -9.0], top_k=1) == {0, 1, 2}


def test_top_k_above_the_vocabulary_keeps_all_of_it() -> None:
    assert drawn_ids([0.0, 1.0, 0.0, 1.0, 0.0, 1.0], top_k=100) == set(range(6))


def test_top_p_keeps_the_fewest_tokens_that_reach_it_and_every_tie_at_its_threshold() -> None:
    half, quarter, eighth = np.log([1 / 2, 1 / 4, 1 / 8]).tolist()
    assert drawn_ids([eighth, half, quarter, eighth, -50.0, -50.0], top_p=0.6) == {1, 2}
    assert drawn_ids([eighth, half, quarter, eighth, -50.0, -50.0], top_p=0.8) == {0, 1, 2, 3}
    assert drawn_ids([eighth, half, quarter, eighth, -50.0, -50.0], top_p=0.4) == {1}


def test_a_tiny_top_p_keeps_the_best_token_and_1_keeps_all() -> None:
    assert drawn_ids([0.0, 0.1, 0.0, 0.0, 0.0, 0.0], top_p=1e-9) == {1}
    assert drawn_ids([0.0, 0.1, 0.0, 0.0, 0.0, 0.0], top_p=1.0) == set(range(6))


def test_top_p_is_taken_of_what_top_k_leaves() -> None:
    # Of all six, 0.6 of the probability needs four ids; of the best three it needs two.
    assert drawn_ids([0.3, 0.2, 0.1, 0.0, 0.0, 0.0], top_p=0.6, top_k=3) == {0, 1}


@pytest.mark.parametrize("temperature", [1e-3, 1e-30])
def test_a_very_small_temperature_is_greedy(temperature: float) -> None:
    np.testing.assert_array_equal(choose(LOGITS, 4, temperature=temperature)[0], LOGITS.argmax(axis=1))


def test_a_lane_at_temperature_0_is_greedy_beside_lanes_that_draw() -> None:
    temperature = np.where(np.arange(LANES) % 2, 0.0, 5.0)
    token, _ = choose(LOGITS, 4, temperature=temperature, top_k=50, top_p=0.9)
    drawn, _ = choose(LOGITS, 4, temperature=5.0, top_k=50, top_p=0.9)
    np.testing.assert_array_equal(token, np.where(np.arange(LANES) % 2, LOGITS.argmax(axis=1), drawn))


@pytest.mark.parametrize("vary", ["seed", "position"])
def test_20_000_draws_follow_the_distribution_over_seeds_and_over_positions(vary: str) -> None:
    logits = np.asarray([0.0, 1.0, 2.0, -1.0, 0.5, 0.5, -3.0, 1.5, 0.1, -0.2, 0.3], np.float32)
    each = {"seed": 7, "position": 11} | {vary: np.arange(20_000)}
    token, _ = choose(np.tile(logits[None], (20_000, 1)), 4, temperature=1.5, **each)
    # 99.9 % of chi-square with 10 degrees of freedom.
    assert chi_square(token, probabilities(logits, 1.5)) < 29.6


def test_20_000_filtered_draws_follow_the_distribution_of_what_is_kept() -> None:
    logits = np.asarray([0.0, 1.0, 2.0, -1.0, 0.5, 0.5, -3.0, 1.5, 0.1, -0.2, 0.3], np.float32)
    rows = np.tile(logits[None], (20_000, 1))
    token, _ = choose(rows, 4, temperature=2.0, top_k=8, top_p=0.8, seed=3)
    expected = probabilities(logits, 2.0, top_k=8, top_p=0.8)
    assert 2 < (expected > 0).sum() < 8
    # 99.9 % of chi-square with at most 6 degrees of freedom.
    assert chi_square(token, expected) < 22.5


def test_noise_is_finite_where_the_hash_is_the_largest_there_is() -> None:
    # The hash of (0, 44, 44092) has its 24 highest bits set.
    noise = gumbel_noise(jnp.uint32([0]), jnp.int32([44]), jnp.int32([44092]))
    assert np.isfinite(noise).all()
    assert noise.max() > 15
