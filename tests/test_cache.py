"""The paged cache is a bag of (k, v, position) for each lane: what was put in comes out, and nothing else."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from jaxpar.attention.cache import Plane, cache_shapes, cache_specs
from jaxpar.attention.store import PagedStore
from jaxpar.mesh import MeshSpec
from jaxpar.plan import Plan

PAGES, PAGE, LANES, WIDTH, HEADS = 12, 4, 3, 4, 2
SIZES = {"k": 3, "v": 2}


def value(name: str, lane: int, position: int) -> np.ndarray:
    """What a token has in a plane, [HEADS, size]: no two tokens have the same."""
    code = 1000.0 * (lane + 1) + 10.0 * position
    return code + np.arange(HEADS)[:, None] + np.arange(SIZES[name]) / 8 + (name == "v") / 2


@jax.jit
def store(
    planes: dict[str, jax.Array], positions_plane: jax.Array, table: jax.Array, start: jax.Array, positions: jax.Array,
    new: dict[str, jax.Array],
) -> tuple[Any, ...]:  # fmt: skip
    """One step: the cache after it, and the bag of every lane."""
    paged = PagedStore(positions_plane, table, start, positions)
    planes, bag = paged.update(planes, new)
    return planes, paged.positions_plane, bag(), paged.key_positions


class Run:
    """A cache that begins as NaN, and what its lanes should hold."""

    def __init__(self, table: np.ndarray) -> None:
        self.table = table.astype(np.int32)
        self.capacity = PAGE * (table >= 0).sum(axis=1)
        self.planes = {name: np.full((1, HEADS, PAGES, PAGE, size), np.nan, np.float32) for name, size in SIZES.items()}
        self.positions = np.full((PAGES, PAGE), -1, np.int32)
        self.stored = np.zeros(table.shape[0], np.int32)
        self.bag: dict[str, np.ndarray] = {}
        self.key_positions = np.zeros(0)

    def add(self, counts: list[int], tokens: int) -> None:
        """Put the next `counts[lane]` tokens in, in a step that is `tokens` wide."""
        lanes = len(counts)
        positions = np.full((lanes, tokens), -1, np.int32)
        new = {name: np.full((lanes, tokens, HEADS, size), np.nan, np.float32) for name, size in SIZES.items()}
        for lane, count in enumerate(counts):
            for i, position in enumerate(range(self.stored[lane], self.stored[lane] + count)):
                positions[lane, i] = position
                for name in SIZES:
                    new[name][lane, i] = value(name, lane, position)
        stepped = store(self.planes, self.positions, self.table, self.stored, positions, new)
        self.planes, self.positions, self.bag, self.key_positions = jax.tree.map(np.array, stepped)
        self.stored = self.stored + np.asarray(counts, np.int32)

    def check(self) -> None:
        """Every lane's bag holds each of its tokens once, with its own key and value."""
        for lane, count in enumerate(self.stored):
            slots = np.flatnonzero(self.key_positions[lane] >= 0)
            assert sorted(self.key_positions[lane, slots]) == list(range(count))
            for slot in slots:
                for name in SIZES:
                    expected = value(name, lane, self.key_positions[lane, slot])
                    np.testing.assert_array_equal(self.bag[name][:, lane, slot], expected)


@given(st.permutations(range(PAGES)), st.tuples(*[st.integers(1, WIDTH)] * LANES), st.data())
def test_every_lane_gets_back_all_tokens_that_it_ever_stored_and_no_others(
    pages: list[int], widths: tuple[int, ...], data: Any
) -> None:
    table = np.asarray(pages).reshape(LANES, WIDTH)
    table[np.arange(WIDTH) >= np.asarray(widths)[:, None]] = -1
    run = Run(table)
    for _ in range(data.draw(st.integers(1, 4), "steps")):
        tokens = data.draw(st.sampled_from([1, 3, 5, 8]), "tokens")
        left = run.capacity - run.stored
        run.add([data.draw(st.integers(0, min(tokens, int(n)))) for n in left], tokens)
        run.check()


def test_a_lane_that_has_no_second_page_does_not_see_the_last_page_which_is_another_lanes() -> None:
    run = Run(np.asarray([[0, -1, -1, -1], [PAGES - 1, 1, 2, 3], [4, 5, 6, -1]]))
    run.add([2, 8, 5], 8)
    run.check()


@pytest.mark.parametrize("first", [1, 3, 4, 5, 8])
def test_a_prefix_may_end_anywhere_in_a_page_and_a_page_may_be_exactly_full(first: int) -> None:
    run = Run(np.arange(LANES * WIDTH).reshape(LANES, WIDTH)[:, ::-1])
    run.add([first, 4, 0], 8)
    run.add([8, 8, 8], 8)
    run.check()
    run.add([0, 4, 8], 8)
    run.check()
    assert run.stored.tolist() == [first + 8, WIDTH * PAGE, WIDTH * PAGE]


def test_a_lane_without_pages_or_tokens_writes_nothing() -> None:
    table = np.arange(LANES * WIDTH).reshape(LANES, WIDTH)
    table[1] = -1
    run = Run(table)
    run.add([5, 0, 5], 5)
    before = jax.tree.map(np.copy, (run.planes, run.positions))
    run.add([0, 0, 0], 5)
    jax.tree.map(np.testing.assert_array_equal, (run.planes, run.positions), before)
    assert (run.key_positions[1] == -1).all()
    run.check()


def test_a_step_touches_only_the_slots_of_its_own_tokens() -> None:
    run = Run(np.arange(LANES * WIDTH).reshape(LANES, WIDTH))
    run.add([3, 1, 7], 8)
    written = np.zeros((PAGES, PAGE), bool)
    for lane, count in enumerate(run.stored):
        for position in range(count):
            written[run.table[lane, position // PAGE], position % PAGE] = True
    np.testing.assert_array_equal(run.positions >= 0, written)
    for plane in run.planes.values():
        np.testing.assert_array_equal(np.isfinite(plane[0]).all(axis=(0, 3)), written)


PLANES = [[Plane("k", 8, 16, ("tp",)), Plane("v", 8, 16, ("tp",))]] * 3


def test_a_cache_holds_its_planes_for_every_slot_and_pages_for_every_replica() -> None:
    cache = cache_shapes(PLANES, 10, Plan(MeshSpec(dp=2, tp=4), page_size=4, dtype="bfloat16"))
    assert len(cache.planes) == 3
    for slot in cache.planes:
        assert {name: (x.shape, x.dtype) for name, x in slot.items()} == dict.fromkeys(
            "kv", ((1, 8, 20, 4, 16), "bfloat16")
        )
    assert (cache.positions.shape, cache.positions.dtype) == ((20, 4), "int32")


def test_pages_lie_over_the_replicas_and_heads_over_tp_and_size_1_over_nothing() -> None:
    specs = cache_specs(PLANES, Plan(MeshSpec(dp=2, tp=4)))
    assert specs.planes[0]["k"] == P(None, ("tp",), ("dp",), None, None)
    assert specs.positions == P(("dp",), None)
    assert cache_specs([[Plane("k", 8, 16, ())]], Plan()).planes[0]["k"] == P(None, None, None, None, None)
    staged = cache_specs(PLANES, Plan(MeshSpec(pp=2, ep=2, cp=2)))
    assert staged.planes[0]["k"] == P(("pp",), ("tp",), ("ep", "cp"), None, None)
    # Stages fill pages of the same numbers at different times.
    assert staged.positions == P(("pp", "ep", "cp"), None)
