"""Attention as GPUs compute it, in interpret mode, against the tiles of a CPU; over pages against the bag of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.attention import tiles
from jaxpar.attention.partial import Partial
from jaxpar.attention.store import Pages
from jaxpar.kernels import gpu_flash
from jaxpar.ledger.flops import trace_flops

RNG = np.random.default_rng(7)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def assert_same(found: Partial, expected: Partial) -> None:
    np.testing.assert_array_equal(np.isneginf(found.lse), np.isneginf(expected.lse))
    seen = ~np.isneginf(expected.lse)
    np.testing.assert_allclose(np.asarray(found.out)[seen], np.asarray(expected.out)[seen], atol=1e-4)
    np.testing.assert_allclose(np.asarray(found.lse)[seen], np.asarray(expected.lse)[seen], atol=1e-4)
    assert not np.isnan(found.out).any()


def bag(queries: int, keys: int, heads: int = 2, lanes: int = 2, group: int = 2, size: int = 16) -> list[np.ndarray]:
    """Queries and keys of requests of other lengths, in any order, some of which are padding; what is none is NaN."""
    q, k = normal(heads, lanes, queries, group, size), normal(heads, lanes, keys, size)
    v = normal(heads, lanes, keys, 32)
    q_at = np.stack([np.where(np.arange(queries) < queries - lane, keys - queries + np.arange(queries), -1)
                     for lane in range(lanes)])  # fmt: skip
    k_at = np.stack([RNG.permutation(np.where(np.arange(keys) < keys - 7 * lane, np.arange(keys), -1))
                     for lane in range(lanes)])  # fmt: skip
    k[:, k_at < 0], v[:, k_at < 0] = np.nan, np.nan
    return [q, k, v, q_at.astype(np.int32), k_at.astype(np.int32)]


@pytest.mark.parametrize(
    ("arrays", "window", "onto"),
    [
        (bag(70, 100), None, False),
        (bag(5, 150, group=3, size=48), 9, True),
        (bag(1, 300, lanes=3), None, False),
        (bag(1, 70), 33, True),
    ],
    ids=["prefill", "window and a partial result", "decode", "decode, window and a partial result"],
)
def test_the_kernel_gives_what_the_tiles_of_a_cpu_give(arrays: list[np.ndarray], window: Any, onto: bool) -> None:
    q = arrays[0]
    before = Partial(normal(*q.shape[:-1], 32), np.where(normal(*q.shape[:-1]) < 0, -np.inf, 0.5).astype(np.float32))
    held = before if onto else None

    def run(attend: Any, **more: Any) -> Partial:
        def of(window: Any, held: Any, *x: Any) -> Partial:
            return attend(*x, onto=held, window=window, scale=0.3, **more)

        return jax.jit(of)(None if window is None else jnp.int32(window), held, *arrays)

    assert_same(run(gpu_flash.attend, interpret=True), run(tiles.attend))


def test_blocks_in_order_are_left_out_or_not_masked_where_every_query_sees_every_key() -> None:
    positions = jnp.arange(256, dtype=jnp.int32)[None]
    lists = gpu_flash._lists(positions, positions, 128, 64, None)
    assert [rows[:count] for rows, count in zip(lists.blocks[0].tolist(), lists.seen[0].tolist(), strict=True)] == [
        [0, 1],
        [0, 1, 2, 3],
    ]
    assert lists.full.tolist() == [[0, 2]]
    within = gpu_flash._lists(positions, positions, 128, 64, 32)
    assert within.seen.tolist() == [[2, 3]]


def test_keys_are_read_where_they_lie_in_pages_of_any_order() -> None:
    heads, pages, page_size, width, lanes = 2, 9, 16, 5, 2
    planes = [normal(heads, pages, page_size, size) for size in (16, 32)]
    table = np.array([[7, 2, 5, -1, -1], [0, 8, 1, 3, 6]], np.int32)
    positions = np.full((lanes, width * page_size), -1, np.int32)
    positions[0, :41], positions[1, :80] = np.arange(41), np.arange(80)
    for plane in planes:
        plane[:, 4] = np.nan  # nobody's
        plane[:, 5, 9:] = np.nan  # not written yet
    q, q_at = normal(heads, lanes, 1, 3, 16), np.array([[40], [79]], np.int32)
    gathered = [x[:, np.maximum(table, 0)].reshape(heads, lanes, width * page_size, -1) for x in planes]
    expected = jax.jit(lambda *x: tiles.attend(*x, None, 0.3))(q, *gathered, q_at, positions)
    paged = jax.jit(lambda *x: gpu_flash.attend_pages(*x, None, 0.3, interpret=True))
    assert_same(paged(q, Pages(*map(jnp.array, planes), jnp.array(table)), q_at, positions), expected)


def test_the_kernel_says_the_flops_of_its_tiles() -> None:
    arrays = bag(1, 300)
    traced = jax.make_jaxpr(lambda *x: gpu_flash.attend(*x, None, None, 0.3))(*arrays)
    assert [row.flops for row in trace_flops(traced)] == [tiles.attend_flops(2, 4, 2, 1, 300, 16, 32)]


def test_sizes_that_are_no_whole_blocks_are_left_to_xla() -> None:
    def fits(*sizes: int, dtype: str = "bfloat16") -> bool:
        return gpu_flash.fits(*(jax.ShapeDtypeStruct((2, 3, 64, size), jnp.dtype(dtype)) for size in sizes))

    assert fits(128, 128) and fits(64, 256) and fits(192, 128) and fits(80, 64)
    assert not fits(576, 512) and not fits(128, 80) and not fits(8, 8) and not fits(24, 16)
    # Three blocks of these do not fit in what a core of an H200 shares.
    assert fits(256, 256) and fits(128, 128, dtype="float32")
    assert not fits(256, 256, dtype="float32") and not fits(192, 128, dtype="float32")
    assert gpu_flash._parts(192) == [(0, 128), (128, 64)]
