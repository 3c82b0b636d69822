"""The attention of accelerators, run as XLA operations, equals the tiles that a CPU runs, under every mask."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.attention import tiles
from jaxpar.attention.partial import Partial
from jaxpar.attention.store import PagedStore, Pages
from jaxpar.devices import abstract_mesh
from jaxpar.kernels import attention, backend, tpu_flash, tpu_jax_paged, tpu_paged, tpu_write
from jaxpar.ledger.flops import trace_flops
from jaxpar.mesh import MeshSpec

SCALE = 0.25
RNG = np.random.default_rng(0)


def normal(*shape: int, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(RNG.standard_normal(shape), dtype)


def assert_equal(found: Partial, expected: Partial) -> None:
    np.testing.assert_allclose(found.out, expected.out, atol=1e-5)
    np.testing.assert_allclose(found.lse, expected.lse, atol=1e-5)


class Problem(NamedTuple):
    """Two lanes of a prefix and a chunk: one with padding, the other's keys dealt as a layout would deal them."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    q_positions: jax.Array
    k_positions: jax.Array


def problem(queries: int, keys: int, group: int, heads: int = 1) -> Problem:
    at = np.full((2, keys), -1, np.int32)
    at[0, : keys - 9], at[1] = np.arange(keys - 9), RNG.permutation(keys)
    ends = np.array([keys - 9, keys])
    q_at = (ends[:, None] - queries + np.arange(queries)).astype(np.int32)
    q_at[0, queries // 2 :] = np.where(queries > 1, -1, q_at[0, queries // 2 :])
    hidden = jnp.where(jnp.asarray(at) < 0, jnp.nan, 0.0)[None, :, :, None]
    k, v = normal(heads, 2, keys, 16) + hidden, normal(heads, 2, keys, 24) + hidden
    return Problem(normal(heads, 2, queries, group, 16), k, v, jnp.asarray(q_at), jnp.asarray(at))


def in_kernel(x: Problem, window: int | None, onto: Partial | None = None) -> Partial:
    run = partial(tpu_flash.attend, window=window, scale=SCALE, interpret=True)
    return jax.jit(run)(*x, onto)


@pytest.mark.parametrize(("queries", "keys", "window"), [(1, 40, None), (200, 700, 90)])
def test_the_flash_kernel_equals_tiles(queries: int, keys: int, window: int | None) -> None:
    x = problem(queries, keys, group=3)
    assert_equal(in_kernel(x, window), tiles.attend(*x, window, SCALE))


def test_the_flash_kernel_goes_on_from_a_part() -> None:
    x = problem(200, 600, 3)
    first, second = (
        x._replace(k=x.k[:, :, part], v=x.v[:, :, part], k_positions=x.k_positions[:, part])
        for part in (slice(256), slice(256, None))
    )
    assert_equal(in_kernel(second, None, in_kernel(first, None)), tiles.attend(*x, None, SCALE))


def test_a_query_that_sees_no_key_has_weight_0_in_the_flash_kernel() -> None:
    x = problem(7, 40, 2)
    found = in_kernel(x._replace(k_positions=jnp.full_like(x.k_positions, -1)), None)
    assert np.isneginf(found.lse).all()
    assert (np.asarray(found.out) == 0).all()


def test_a_shard_of_the_flash_kernel_varies_over_the_axes_of_what_it_takes() -> None:
    x = problem(8, 40, 2)
    specs = (P(None, "dp"),) * 3 + (P("dp"),) * 2
    mesh = abstract_mesh(MeshSpec.parse("dp=2"))
    run = partial(attention.attend, window=None, scale=SCALE)
    out = jax.eval_shape(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=P(None, "dp")), *x)
    assert out.out.shape == (1, 2, 8, 2, 24)


class Cached(NamedTuple):
    """Requests of any length in pages of any order; what no request stored is NaN."""

    pages: Pages
    positions: np.ndarray
    start: np.ndarray

    @property
    def q_positions(self) -> jax.Array:
        return jnp.asarray(self.start[:, None] - 1)

    @property
    def k_positions(self) -> jax.Array:
        table = np.asarray(self.pages.table)
        at = np.where(table[:, :, None] >= 0, self.positions[table], -1)
        return jnp.asarray(at.reshape(len(table), -1))

    def bag(self, plane: jax.Array) -> jax.Array:
        table = np.maximum(self.pages.table, 0)
        return plane[:, table].reshape(plane.shape[0], len(table), -1, plane.shape[3])


def cached(lengths: list[int], width: int, heads: int, page: int = 8, size: int = 128) -> Cached:
    count = len(lengths) * width
    ids, table = iter(RNG.permutation(count)), np.full((len(lengths), width), -1, np.int32)
    positions = np.full((count, page), -1, np.int32)
    for lane, length in enumerate(lengths):
        for column in range(min(length // page + 1, width)):
            table[lane, column] = next(ids)
            held = max(min(page, length - column * page), 0)
            positions[table[lane, column], :held] = np.arange(held) + column * page
    hidden = jnp.where(jnp.asarray(positions) < 0, jnp.nan, 0.0)[None, :, :, None]
    k, v = (normal(heads, count, page, size) + hidden for _ in "kv")
    return Cached(Pages(k, v, jnp.asarray(table)), positions, np.asarray(lengths, np.int32))


@pytest.mark.parametrize(("lengths", "group", "window"), [([600, 0, 1, 130], 3, None), ([512, 77, 600], 1, 100)])
def test_the_paged_kernel_equals_tiles_over_what_the_pages_hold(
    lengths: list[int], group: int, window: int | None
) -> None:
    x = cached(lengths, 75, heads=2)
    q = normal(2, len(lengths), 1, group, 128)
    at = x.q_positions, x.k_positions
    found = jax.jit(partial(tpu_paged.attend, window=window, scale=SCALE, interpret=True))(q, x.pages, *at)
    assert_equal(found, tiles.attend(q, x.bag(x.pages.k), x.bag(x.pages.v), *at, window, SCALE))


def in_bfloat16(x: Cached) -> Pages:
    k, v = (jnp.nan_to_num(plane).astype("bfloat16") for plane in (x.pages.k, x.pages.v))
    return Pages(k, v, x.pages.table)


@pytest.mark.parametrize(("lengths", "group", "heads"), [([0, 530, 0, 1], 3, 2), ([40, 0], 8, 1)])
def test_the_paged_kernel_of_jax_equals_tiles_over_what_the_pages_hold(
    lengths: list[int], group: int, heads: int
) -> None:
    x = cached(lengths, 5, heads, page=128)
    pages, q = in_bfloat16(x), normal(heads, len(lengths), 1, group, 128, dtype="bfloat16")
    found = jax.jit(partial(tpu_jax_paged.attend, scale=SCALE, interpret=True))(q, pages, x.q_positions)
    exact = (y.astype("float32") for y in (q, x.bag(pages.k), x.bag(pages.v)))
    expected = tiles.attend(*exact, x.q_positions, x.k_positions, None, SCALE)
    np.testing.assert_allclose(found, expected.out, atol=1e-5)


def test_what_else_a_request_has_not_stored_does_not_reach_it_from_the_pages_of_others() -> None:
    x = cached([40, 17], 5, heads=1, page=128)
    pages, q = in_bfloat16(x), normal(1, 2, 1, 8, 128, dtype="bfloat16")
    of_other = x.pages.table[1, :2]
    pages = pages._replace(k=pages.k.at[:, of_other].set(jnp.nan), v=pages.v.at[:, of_other].set(jnp.nan))
    found = tpu_jax_paged.attend(q, pages, x.q_positions, SCALE, interpret=True)
    assert np.isfinite(found[:, 0]).all()
    assert np.isnan(found[:, 1]).all()


def test_the_paged_kernel_of_jax_takes_bfloat16_without_a_window() -> None:
    pages = in_bfloat16(cached([40], 35, heads=1, page=16))
    assert tpu_jax_paged.fits(pages, None)
    assert not tpu_jax_paged.fits(pages, 64)
    assert not tpu_jax_paged.fits(pages._replace(k=pages.k.astype("float32"), v=pages.v.astype("float32")), None)
    assert not tpu_jax_paged.fits(pages._replace(v=pages.v[..., :64]), None)
    assert not tpu_jax_paged.fits(pages._replace(table=jnp.zeros((513, 256), jnp.int32)), None)


def test_a_shard_of_the_paged_kernel_of_jax_varies_over_the_axes_of_what_it_takes() -> None:
    x = cached([40, 9], 35, heads=2, page=16)
    pages, q = in_bfloat16(x), normal(2, 2, 1, 3, 128, dtype="bfloat16")
    specs = P("tp", "dp"), Pages(P("tp"), P("tp"), P("dp")), P("dp")
    run = jax.shard_map(
        partial(tpu_jax_paged.attend, scale=SCALE),
        mesh=abstract_mesh(MeshSpec.parse("dp=2,tp=2")),
        in_specs=specs,
        out_specs=P("tp", "dp"),
    )
    assert jax.eval_shape(run, q, pages, x.q_positions).shape == q.shape


def test_pages_are_read_where_they_lie_if_they_are_whole_tiles() -> None:
    for page, size, itemsize, fits in ((16, 128, 2, True), (8, 128, 4, True), (8, 128, 2, False), (16, 64, 2, False)):
        plane = jax.ShapeDtypeStruct((1, 4, page, size), jnp.dtype(f"float{8 * itemsize}"))
        assert tpu_paged.fits(Pages(plane, plane, None)) == tpu_write.fits([plane]) == fits


@pytest.mark.parametrize(("page", "keys"), [(16, 512), (48, 384), (256, 512), (512, 512)])
def test_a_block_of_pages_is_whole_rows_of_keys_and_no_more_than_a_core_holds(page: int, keys: int) -> None:
    plane = jax.ShapeDtypeStruct((8, 64, page, 128), jnp.bfloat16)
    pages = Pages(plane, plane, jax.ShapeDtypeStruct((4, 64), jnp.int32))
    assert tpu_paged._pages_a_block(pages) * page == keys


def test_tokens_are_written_in_place_as_by_a_scatter() -> None:
    planes = [normal(2, 12, 8, 128, dtype=dtype) for dtype in ("float32", "float32")]
    new = [normal(3, 2, 128) for _ in planes]
    page, slot = jnp.asarray([5, 12, 0]), jnp.asarray([7, 3, 0])
    found = jax.jit(partial(tpu_write.write, interpret=True))(planes, new, page, slot)
    for before, token, after in zip(planes, new, found, strict=True):
        expected = np.array(before)
        expected[:, 5, 7], expected[:, 0, 0] = token[0], token[2]
        np.testing.assert_array_equal(after, expected)


def test_positions_that_are_counted_equal_those_that_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    x = cached([17, 0, 40], 7, heads=1)
    new = x.start[:, None] + np.arange(5, dtype=np.int32)
    new[1] = -1
    step = (jnp.asarray(x.positions), x.pages.table, jnp.asarray(x.start), jnp.asarray(new))
    looked_up = PagedStore(*step).key_positions
    monkeypatch.setattr(backend, "platform_of_mesh", lambda: "tpu")
    np.testing.assert_array_equal(PagedStore(*step, in_order=True).key_positions, looked_up)


@pytest.mark.parametrize("queries", [1, 300])
def test_the_ledger_counts_a_kernel_as_it_counts_the_tiles(queries: int) -> None:
    x = problem(queries, 700, 3)

    def flops(interpret: bool) -> int:
        run = tpu_flash.attend if interpret else tiles.attend
        rest = {"onto": None, "interpret": True} if interpret else {}
        (row,) = trace_flops(jax.make_jaxpr(partial(run, window=None, scale=SCALE, **rest))(*x))
        return row.flops

    assert flops(interpret=True) == flops(interpret=False)


def test_the_ledger_counts_the_paged_kernel_of_jax_as_it_counts_the_tiles() -> None:
    x = cached([40, 9], 35, heads=2, page=16)
    pages, q = in_bfloat16(x), normal(2, 2, 1, 3, 128, dtype="bfloat16")
    ours = partial(tiles.attend, window=None, scale=SCALE)
    in_tiles = jax.make_jaxpr(ours)(q, x.bag(pages.k), x.bag(pages.v), x.q_positions, x.k_positions)
    in_kernel = jax.make_jaxpr(partial(tpu_jax_paged.attend, scale=SCALE))(q, pages, x.q_positions)
    assert trace_flops(in_kernel) == trace_flops(in_tiles)
