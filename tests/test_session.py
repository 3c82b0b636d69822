"""Requests in their lanes: where they sit, which programs their sizes need, and what one step leaves untouched."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_models import open_session, write_model

import jaxpar
from jaxpar.batch import StepBatch
from jaxpar.engine.lanes import assign
from jaxpar.engine.sizes import lanes_of
from jaxpar.mesh import MeshSpec
from jaxpar.plan import PHASES, Phase, Plan
from jaxpar.program import Programs
from jaxpar.runner import Runner
from jaxpar.vocabulary.sampling import SamplingArrays

_compiled: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **kwargs: _compiled.append(event) if event.endswith("backend_compile_duration") else None
)


@pytest.fixture
def compiled() -> list[str]:
    """Grows with every program that XLA compiles, however it was asked to."""
    _compiled.clear()
    return _compiled


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


# Lanes and pages


@given(st.lists(st.integers(1, 50), min_size=1, max_size=17), st.integers(1, 4), st.integers(1, 16), st.integers(1, 4))
def test_every_request_has_a_lane_of_its_group_and_pages_of_its_own(
    capacity: list[int], dp: int, page_size: int, pp: int
) -> None:
    lanes = assign(capacity, Plan(MeshSpec(pp=pp, dp=dp, tp=2), page_size=page_size))
    local = lanes.total // dp
    assert len(set(zip(lanes.group, lanes.lane, strict=True))) == len(capacity)
    assert set(lanes.group) == set(range(min(pp, -(-len(capacity) // dp))))
    taken: list[set[int]] = [set() for _ in range(dp)]
    for tokens, lane, table in zip(capacity, lanes.lane, lanes.table, strict=True):
        pages = table[table >= 0].tolist()
        assert len(pages) * page_size >= tokens > (len(pages) - 1) * page_size
        assert table[: len(pages)].tolist() == pages
        assert not taken[lane // local] & set(pages)
        taken[lane // local] |= set(pages)
    assert all(page < lanes.pages for pages in taken for page in pages)


@given(st.integers(1, 33), st.integers(1, 8))
def test_requests_are_spread_evenly_and_lanes_are_the_same_on_every_replica(count: int, dp: int) -> None:
    lanes = assign([1] * count, Plan(MeshSpec(dp=dp)))
    local = lanes.total // dp
    assert lanes.total == local * dp
    assert local == lanes_of(count, Plan(MeshSpec(dp=dp)))
    of_replica = np.bincount([lane // local for lane in lanes.lane], minlength=dp)
    assert of_replica.max() - of_replica.min() <= 1


# Programs


def test_nothing_compiles_after_a_warm_up_over_the_buckets(model: Path, compiled: list[str]) -> None:
    runner = jaxpar.load(model, mesh="dp=2,cp=2", chunk=4, page_size=4)

    def run(lengths: tuple[int, ...], new_tokens: int) -> None:
        rows = [np.arange(length) % 97 for length in lengths]
        for _ in runner.stream(rows, max_new_tokens=new_tokens, ignore_eos=True):
            pass

    # Every way in which up to three requests take one page or two, with last chunks of 1, 2 and 4 tokens in each.
    for count in (1, 2, 3):
        for is_long in itertools.product([False, True], repeat=count):
            for long, short in ((5, 1), (6, 2), (8, 4), (9, 1), (10, 2), (12, 4)):
                run(tuple(long if two else short for two in is_long), new_tokens=4)
    assert 0 < len(compiled) < 40
    compiled.clear()

    rng = np.random.default_rng(0)
    for _ in range(40):
        lengths = tuple(rng.integers(1, 13, rng.integers(1, 4)).tolist())
        run(lengths, int(rng.integers(1, 5)))
        runner.generate([[1] * length for length in lengths], max_new_tokens=4, ignore_eos=True)
    assert compiled == []


def test_a_second_runner_of_the_same_sizes_compiles_its_own_programs_so_the_count_sees_them(
    model: Path, compiled: list[str]
) -> None:
    for _ in range(2):
        jaxpar.load(model).generate([[1, 2, 3]], max_new_tokens=2, ignore_eos=True)
    assert len(compiled) == 6  # prefill, decode, and an empty cache


def test_a_step_gives_the_caches_memory_to_the_next(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    empty = Programs.empty_cache
    monkeypatch.setattr(Programs, "empty_cache", lambda *args: made.append(empty(*args)) or made[-1])
    runner = jaxpar.load(model, mesh="dp=2,tp=2")
    runner.logits([[1, 2, 3]])
    assert all(x.is_deleted() for x in jax.tree.leaves(made))
    assert not any(x.is_deleted() for x in jax.tree.leaves(runner.weights))


# One device


def batches(runner: Runner, phase: Phase) -> Iterator[StepBatch]:
    """Two prefill steps, of which the second begins in the middle of a page, or two decode steps."""
    size = 1 if phase == "decode" else 5
    rng = np.random.default_rng(3)
    for step in range(2):
        start = np.asarray([step * size, 0], np.int32)
        positions = np.full((2, size), -1, np.int32)
        positions[0] = start[0] + np.arange(size)
        options = SamplingArrays(
            np.asarray([0.7, 0], np.float32),
            np.asarray([50, 0], np.int32),
            np.asarray([0.9, 1], np.float32),
            np.asarray([5, 0], np.uint32),
            start + size,
        )
        table = np.asarray([[2, 0, 1], [-1, -1, -1]], np.int32)
        tokens = rng.integers(0, runner.config.vocab_size, (2, size)).astype(np.int32)
        yield StepBatch(tokens, positions, start[:, None], table, np.full(2, size - 1, np.int32), options)


@pytest.mark.parametrize("kind", [{}, {"sampled": True}, {"logits": True}], ids=["greedy", "sampled", "logits"])
@pytest.mark.parametrize("phase", PHASES)
def test_axes_of_size_1_are_bit_identical_to_no_axes_at_all(model: Path, phase: Phase, kind: dict[str, Any]) -> None:
    runner = jaxpar.load(model, mesh="dp=1,tp=1", page_size=4)
    programs, flags = runner.programs, {"logits": False, "sampled": False, "room": 0, **kind}
    with_mesh, without = programs.empty_cache(4), jax.device_get(programs.empty_cache(4))
    weights = jax.device_get(runner.weights)
    plain = jax.jit(lambda *arguments: programs._local_step(*arguments, phase, **flags))
    for batch in batches(runner, phase):
        with_mesh, on_mesh = programs.step(phase, **flags)(runner.weights, with_mesh, batch)
        without, alone = plain(weights, without, batch)
        jax.tree.map(np.testing.assert_array_equal, (with_mesh, on_mesh), (without, alone))


# Requests together


def test_a_request_has_the_same_logits_alone_and_beside_others_in_any_lane(model: Path) -> None:
    runner = jaxpar.load(model, mesh="dp=2,tp=2", page_size=4)
    prompts = np.random.default_rng(5).integers(0, 101, (3, 9))
    together = runner.logits(prompts)
    assert together.shape == (3, 9, 101)
    for i, prompt in enumerate(prompts):
        np.testing.assert_allclose(runner.logits(prompt[None])[0], together[i], atol=1e-4)
    np.testing.assert_allclose(runner.logits(prompts[::-1])[::-1], together, atol=1e-4)


def test_a_cached_prefix_and_then_tokens_one_by_one_are_one_prefill(model: Path) -> None:
    runner = jaxpar.load(model, mesh="tp=3", page_size=4)
    tokens = np.random.default_rng(6).integers(0, 101, (2, 11))
    whole = runner.logits(tokens)
    running = open_session(runner, [tokens[0, :6].tolist(), tokens[1, :3].tolist()], 5)
    for _ in running.prefill():
        pass
    for at in range(5):
        (decoded,) = running.decode({0: int(tokens[0, 6 + at]), 1: int(tokens[1, 3 + at])}, logits=True)
        for request, position in ((0, 6 + at), (1, 3 + at)):
            found = np.asarray(decoded.output.logits)[decoded.rows[request], 0, :101]
            np.testing.assert_allclose(found, whole[request, position], atol=1e-4)
