"""`verify` passes where every rank is right, and names the rank that is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from oracle_data import load_oracle
from sample_models import oracle_runner, write_model

import jaxpar
from jaxpar import registry
from jaxpar.runner import Runner
from jaxpar.verify import RELATIVE_TOLERANCE, TOLERANCE, Verification, verify
from jaxpar.vocabulary.sampling import Sampled, sample

ORACLE = load_oracle("llama")
PROMPTS, NEW_TOKENS = ORACLE.prompts[:3], 4
PAGES = {"page_size": 32}
MESH = "dp=2,tp=2"
REPLICAS = [{0, 1}, {2, 3}]  # prompts 0 and 2 are the first one's


def llama(mesh: str, dtype: str = "float32") -> Runner:
    return oracle_runner("llama", mesh, dtype=dtype, **PAGES)


def with_shard(name: str, rank: int, change: Callable[[np.ndarray], np.ndarray]) -> Runner:
    """The mesh, where one rank's shard (or copy) of a weight is not what it should be."""
    right = llama(MESH)
    broken = right.programs.mesh.devices.flat[rank]
    shards = [
        jax.device_put(change(np.array(shard.data)), broken) if shard.device == broken else shard.data
        for shard in right.weights[name].addressable_shards
    ]
    whole = right.weights[name]
    array = jax.make_array_from_single_device_arrays(whole.shape, whole.sharding, shards)
    return Runner(right.checkpoint, right.programs, right.weights | {name: array})


def run(mesh: Runner, **options: Any) -> Verification:
    return verify(mesh, llama("tp=1"), PROMPTS, NEW_TOKENS, **options)


def wrong_ranks(verification: Verification) -> set[int]:
    limit = verification.tolerance
    return {r.rank for r in verification.results if not r.max_difference <= limit or r.wrong_tokens}


def test_a_right_mesh_passes_with_every_rank_of_every_prompts_replica_compared() -> None:
    verification = run(llama(MESH))
    assert verification.passed
    assert wrong_ranks(verification) == set()
    assert [(r.prompt, r.rank) for r in verification.results] == [(0, 0), (0, 1), (1, 2), (1, 3), (2, 0), (2, 1)]
    assert 0 < verification.max_difference < 1e-4
    for result in verification.results:
        # Every token of the prompt and every one that is fed back, of the rank's half of 97 ids.
        tokens = len(PROMPTS[result.prompt]) + NEW_TOKENS - 1
        assert result.compared == tokens * (49 if result.rank % 2 == 0 else 48)
        assert (result.wrong_tokens, result.ties) == (0, 0)


def test_the_tokens_and_the_margin_are_those_of_one_device() -> None:
    verification = run(llama(MESH))
    assert verification.tokens == [row[:NEW_TOKENS] for row in ORACLE.greedy[:3]]
    assert verification.margin >= ORACLE.margin - 1e-4
    assert verification.margin > verification.tolerance


def test_bfloat16_on_a_mesh_is_bfloat16_on_one_device_within_its_rounding() -> None:
    verification = verify(llama("tp=3", "bfloat16"), llama("tp=1", "bfloat16"), PROMPTS, NEW_TOKENS)
    assert verification.passed
    assert 1e-4 < verification.max_difference < 0.1


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_whose_slice_of_the_head_is_wrong_is_named_alone(rank: int) -> None:
    verification = run(with_shard("head", rank, lambda w: w * 1.001))
    assert not verification.passed
    assert wrong_ranks(verification) == {rank}


def test_a_rank_whose_copy_of_the_last_norm_is_wrong_is_named_alone() -> None:
    assert wrong_ranks(run(with_shard("norm", 3, lambda w: w + 1e-3))) == {3}


@pytest.mark.parametrize("name", ["slots.1.ffn.down.weight", "slots.0.attention.qkv.weight", "embedding"])
def test_a_wrong_partial_sum_shows_on_every_rank_of_its_replica_and_on_no_other(name: str) -> None:
    verification = run(with_shard(name, 2, lambda w: w + 0.01))
    assert not verification.passed
    assert wrong_ranks(verification) == REPLICAS[1]


def test_a_nan_passes_nothing() -> None:
    verification = run(with_shard("norm", 1, lambda w: np.full_like(w, np.nan)))
    assert not verification.passed
    assert np.isnan(verification.max_difference)
    assert wrong_ranks(verification) >= {1}
    everywhere = verify(
        with_shard("norm", 0, lambda w: np.full_like(w, np.nan)), llama("tp=1"), PROMPTS, NEW_TOKENS, tolerance=1e9
    )
    assert not everywhere.passed


def test_the_tolerance_decides_what_is_a_difference_and_what_is_a_tie() -> None:
    slightly_wrong = with_shard("head", 3, lambda w: w * 1.001)
    assert not run(slightly_wrong).passed
    assert run(slightly_wrong, tolerance=0.1).passed


def test_large_logits_may_differ_by_a_part_of_the_largest(tmp_path: Path) -> None:
    head = 300 * np.random.default_rng(0).standard_normal((101, 24)).astype(np.float32)
    model = write_model(tmp_path, tensors={"lm_head.weight": head})
    on_mesh, single = jaxpar.load(model, mesh="dp=2,tp=3"), jaxpar.load(model)
    prompts = [[5, 6, 7, 8, 9], [10, 11, 12]]
    verification = verify(on_mesh, single, prompts, NEW_TOKENS)
    largest = max(
        np.abs(single.logits([prompt + tokens[:-1]])).max()
        for prompt, tokens in zip(prompts, verification.tokens, strict=True)
    )
    assert verification.passed
    assert verification.tolerance == pytest.approx(RELATIVE_TOLERANCE["float32"] * largest, rel=1e-4)
    assert verification.max_difference > TOLERANCE["float32"]
    assert not verify(on_mesh, single, prompts, NEW_TOKENS, tolerance=TOLERANCE["float32"]).passed


def test_a_token_that_differs_where_the_logits_agree_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def second_best(logits: jax.Array, *rest: Any) -> Sampled:
        best = logits.max(axis=1, keepdims=True)
        return sample(jax.numpy.where(logits == best, -jax.numpy.inf, logits), *rest)

    single = llama("tp=1")
    run(llama(MESH))  # the right programs are compiled before sampling is broken
    broken = [replace(s, run=second_best) if s.sublayer == "sampling" else s for s in registry.STRATEGIES]
    monkeypatch.setattr(registry, "STRATEGIES", tuple(broken))
    oracle_runner.cache_clear()
    verification = verify(llama(MESH), single, PROMPTS, NEW_TOKENS)
    oracle_runner.cache_clear()
    assert verification.max_difference < 1e-4
    assert not verification.passed
    assert all(result.wrong_tokens == 1 for result in verification.results)


def test_progress_is_told_in_words() -> None:
    said: list[str] = []
    run(llama(MESH), progress=said.append)
    assert len(said) == 3
