"""Attention over some of the keys, and the merge of such parts, against a float64 softmax over all of them."""

from __future__ import annotations

from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.attention import tiles
from jaxpar.attention.packed import pack, packed_bytes, unpack
from jaxpar.attention.partial import Partial, merge_all, visible
from jaxpar.attention.tiles import attend, seen_tiles

# A part over no key (LSE -inf) may have any output; so may weights that vanish beside others.
LSES = st.one_of(st.just(-np.inf), st.floats(-50, 50), st.sampled_from([-200.0, 200.0]))


def part(lse: float, out: float) -> Partial:
    return Partial(jnp.full((2,), np.nan if np.isneginf(lse) else out, jnp.float32), jnp.float32(lse))


def merge(a: Partial, b: Partial) -> Partial:
    return merge_all(Partial(*(jnp.stack(values) for values in zip(a, b, strict=True))))


MERGE = jax.jit(merge)


def assert_same(a: Partial, b: Partial) -> None:
    np.testing.assert_allclose(a.lse, b.lse, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(a.out, b.out, rtol=1e-3, atol=1e-4)


def problem(
    queries: int, keys: int, dtype: type = np.float32, seed: int = 0, kv: int = 2, group: int = 3, size: int = 8
) -> tuple[np.ndarray, ...]:
    """(q, k, v, query positions, key positions) of two lanes; keys are shuffled, some slots hold none and are NaN.

    Values are larger than keys, as they may be: outputs are as large.
    """
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((kv, 2, queries, group, size)).astype(dtype)
    k = rng.standard_normal((kv, 2, keys, size)).astype(dtype)
    v = (1 + rng.standard_normal((kv, 2, keys, size + 3))).astype(dtype)
    q_positions = np.stack([np.arange(keys - queries, keys), np.arange(queries)]).astype(np.int32)
    q_positions[1, -1] = -1
    k_positions = np.stack([rng.permutation(keys), rng.permutation(keys)]).astype(np.int32)
    empty = rng.random((2, keys)) < 0.2
    empty[1] |= k_positions[1] >= queries
    k_positions[empty] = -1
    k[:, empty] = v[:, empty] = np.nan
    return q, k, v, q_positions, k_positions


def softmax_over_all_keys(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, q_positions: np.ndarray, k_positions: np.ndarray, window: int | None
) -> Partial:
    """Float64; a query without keys gets output 0 and LSE -inf."""
    key, query = k_positions[:, None, :], q_positions[:, :, None]
    seen = (key >= 0) & (key <= query) & (query - key < (window or np.inf))
    scores = np.einsum("kbtgd,kbsd->kbtgs", q.astype(float), np.nan_to_num(k.astype(float))) * q.shape[-1] ** -0.5
    weights = np.exp(np.where(seen[None, :, :, None, :], scores, -np.inf))
    total = weights.sum(axis=-1)
    out = np.einsum("kbtgs,kbsd->kbtgd", weights, np.nan_to_num(v.astype(float)))
    with np.errstate(divide="ignore", invalid="ignore"):
        return Partial(np.where(total[..., None] == 0, 0, out / total[..., None]), np.log(total))


@jax.jit(static_argnames=("window", "tile"))
def compiled(*arrays: jax.Array, window: int | None, tile: int) -> Partial:
    """Tests change the size of a tile, so it tells programs apart."""
    assert tile == tiles.KEY_TILE
    return attend(*arrays, window, arrays[0].shape[-1] ** -0.5)


def run(arrays: tuple[np.ndarray, ...], window: int | None = None) -> Partial:
    return compiled(*arrays, window=window, tile=tiles.KEY_TILE)


def tiles_of(monkeypatch: pytest.MonkeyPatch, keys: int) -> None:
    monkeypatch.setattr(tiles, "KEY_TILE", keys)


# Merging


def test_parts_merge_by_natural_logarithms() -> None:
    merged = merge(part(np.log(2), 0.0), part(np.log(8), 10.0))
    np.testing.assert_allclose(merged.out, 8.0, rtol=1e-6)
    np.testing.assert_allclose(merged.lse, np.log(10), rtol=1e-6)


@given(st.tuples(LSES, LSES), st.tuples(st.floats(-9, 9), st.floats(-9, 9)))
def test_the_order_of_two_parts_does_not_matter(lses: tuple[float, ...], outs: tuple[float, ...]) -> None:
    a, b = map(part, lses, outs)
    assert_same(MERGE(a, b), MERGE(b, a))


@given(st.tuples(LSES, LSES, LSES), st.tuples(*[st.floats(-9, 9)] * 3))
def test_merging_is_associative(lses: tuple[float, ...], outs: tuple[float, ...]) -> None:
    a, b, c = map(part, lses, outs)
    assert_same(MERGE(MERGE(a, b), c), MERGE(a, MERGE(b, c)))


@given(st.floats(-50, 50), st.floats(-9, 9))
def test_a_part_over_no_key_changes_nothing_though_its_output_is_nan(lse: float, out: float) -> None:
    whole, nothing = part(lse, out), part(-np.inf, 0.0)
    assert np.isnan(nothing.out).all()
    assert_same(MERGE(whole, nothing), whole)
    assert_same(MERGE(nothing, whole), whole)


@given(st.lists(st.tuples(LSES, st.floats(-9, 9)), min_size=2, max_size=8))
def test_all_parts_at_once_merge_as_one_by_one_in_any_order(given: list[tuple[float, float]]) -> None:
    parts = [part(lse, out) for lse, out in given]
    at_once = merge_all(Partial(*(jnp.stack(values) for values in zip(*parts, strict=True))))
    assert_same(at_once, reduce(MERGE, parts))
    assert_same(at_once, reduce(MERGE, parts[::-1]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_packed_part_keeps_its_lse_in_every_bit_and_its_output_rounded(dtype: str) -> None:
    rng = np.random.default_rng(1)
    lse = np.float32([-np.inf, 0.0, 88.7, *rng.standard_normal(5)])
    whole = Partial(jnp.asarray(rng.standard_normal((8, 6)), jnp.float32).at[0].set(np.nan), jnp.asarray(lse))
    packed = pack(whole, jnp.dtype(dtype))
    assert packed.shape[-1] * packed.dtype.itemsize == packed_bytes(6, packed.dtype.itemsize)
    back = unpack(packed, jnp.dtype(dtype))
    np.testing.assert_array_equal(np.asarray(back.lse).view(np.int32), lse.view(np.int32))
    np.testing.assert_array_equal(back.out, whole.out.astype(dtype).astype(jnp.float32))


def test_two_parts_over_no_key_are_a_part_over_no_key() -> None:
    merged = merge(part(-np.inf, 0.0), part(-np.inf, 0.0))
    assert np.isneginf(merged.lse)
    assert (np.asarray(merged.out) == 0).all()


# Attention over a bag of keys


@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("queries", [1, 7])
def test_attention_is_the_softmax_over_the_visible_keys(queries: int, window: int | None) -> None:
    arrays = problem(queries, 40)
    expected, found = softmax_over_all_keys(*arrays, window), run(arrays, window)
    np.testing.assert_allclose(found.out, expected.out, atol=1e-5)
    np.testing.assert_allclose(found.lse, expected.lse, atol=1e-5)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("keys", [17, 40, 48])
def test_tiles_equal_one_untiled_attention(keys: int, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = problem(7, keys)
    untiled = run(arrays, window)
    tiles_of(monkeypatch, 16)
    assert_same(run(arrays, window), untiled)


def test_a_bag_of_more_keys_than_a_tile_holds_is_attended_to_whole() -> None:
    arrays = problem(2, tiles.KEY_TILE + 300, kv=1, group=1)
    np.testing.assert_allclose(run(arrays).out, softmax_over_all_keys(*arrays, None).out, atol=1e-5)


@pytest.mark.parametrize("window", [None, 90])
@pytest.mark.parametrize(("queries", "keys", "group"), [(130, 300, 1), (300, 300, 3), (64, 513, 4)])
@pytest.mark.parametrize("at_once", ["cpu", "tpu"])
def test_tiles_with_and_without_a_mask_equal_a_softmax_and_go_on_from_a_part(
    queries: int, keys: int, group: int, window: int | None, at_once: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One head of one lane at a time, as a CPU does, and all at once, as accelerators do.
    monkeypatch.setattr(
        tiles.lax, "platform_dependent", lambda *args, cpu, default: {"cpu": cpu}.get(at_once, default)(*args)
    )
    q, k, v, q_positions, k_positions = problem(queries, keys, group=group)
    order = np.argsort(np.where(k_positions < 0, keys, k_positions), axis=1)
    k, v = (np.take_along_axis(x, order[None, :, :, None], axis=2) for x in (k, v))
    k_positions = np.take_along_axis(k_positions, order, axis=1)

    def in_parts(*parts: slice) -> Partial:
        done = None
        for part in parts:
            held = k[:, :, part], v[:, :, part], q_positions, k_positions[:, part]
            done = jax.jit(lambda *held, done=done: attend(q, *held, window, q.shape[-1] ** -0.5, onto=done))(*held)
        assert done is not None
        return done

    expected = softmax_over_all_keys(q, k, v, q_positions, k_positions, window)
    for found in (in_parts(slice(None)), in_parts(slice(200), slice(200, None))):
        np.testing.assert_allclose(found.out, expected.out, atol=1e-5)
        np.testing.assert_allclose(found.lse, expected.lse, atol=1e-5)


def test_a_query_that_sees_no_key_has_weight_0_and_no_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, q_positions, k_positions = problem(7, 40)
    for tile in (64, 16):
        tiles_of(monkeypatch, tile)
        for hidden in (np.full_like(k_positions, -1), np.where(k_positions >= 0, k_positions + 1000, -1)):
            found = run((q, k, v, q_positions, hidden))
            assert np.isneginf(found.lse).all()
            assert (np.asarray(found.out) == 0).all()


@pytest.mark.parametrize("cut", [0, 1, 13, 40])
def test_a_cached_prefix_and_a_chunk_merge_to_one_unsplit_attention(cut: int) -> None:
    q, k, v, q_positions, k_positions = problem(7, 40)
    both = [run((q, k[:, :, part], v[:, :, part], q_positions, k_positions[:, part]))
            for part in (slice(cut), slice(cut, None)) if k_positions[:, part].size]  # fmt: skip
    assert_same(reduce(merge, both), run((q, k, v, q_positions, k_positions)))


@pytest.mark.parametrize("parts", [1, 16])
@pytest.mark.parametrize("keys", [64, 512, 4096])
def test_the_error_of_bfloat16_grows_neither_with_keys_nor_with_parts(keys: int, parts: int) -> None:
    q, k, v, q_positions, k_positions = problem(1, keys, jnp.bfloat16, kv=1, group=2, size=16)
    exact = softmax_over_all_keys(q, k, v, q_positions, k_positions, None)
    pieces = [(slice(None), slice(None), slice(at, at + keys // parts)) for at in range(0, keys, keys // parts)]
    found = [run((q, k[at], v[at], q_positions, k_positions[at[1:]])) for at in pieces]
    # One rounding of a value near 1 to eight bits is 2^-8.
    np.testing.assert_allclose(reduce(MERGE, found).out, exact.out, atol=2**-8)


@given(st.data())
def test_of_a_causal_mask_exactly_the_tiles_are_left_out_in_which_no_query_sees_a_key(data: st.DataObject) -> None:
    # Any layout leaves positions in ascending order on a rank, and padding after them.
    def positions(length: int) -> np.ndarray:
        held = sorted(data.draw(st.sets(st.integers(0, 60), max_size=length)))
        return np.asarray([held + [-1] * (length - len(held))], np.int32)

    q, k = positions(12), positions(20)
    window = data.draw(st.one_of(st.none(), st.integers(1, 30)))
    seen = np.asarray(visible(jnp.asarray(q), jnp.asarray(k), window))[0].reshape(3, 4, 4, 5).any(axis=(1, 3))
    computed = seen_tiles(q, k, 4, 5, window)[0]
    np.testing.assert_array_equal(computed, np.asarray(seen_tiles(jnp.asarray(q), jnp.asarray(k), 4, 5, window))[0])
    assert (computed >= seen).all()
    if window is None:
        np.testing.assert_array_equal(computed, seen)


@pytest.mark.parametrize("keys", [1024, 32768])
def test_the_error_over_cp_is_flat_in_the_number_of_ranks_and_in_the_length(keys: int) -> None:
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal((1, 1, *shape, 64)).astype(jnp.bfloat16) for shape in ((8, 4), (keys,), (keys,)))
    q_at, k_at = np.full((1, 8), keys, np.int32), np.arange(keys, dtype=np.int32)[None]
    exact = softmax_over_all_keys(q, k, v, q_at, k_at, None).out
    run_on = jax.jit(lambda *rank: pack(attend(q, *rank[:2], q_at, rank[2], None, 0.125), jnp.dtype("bfloat16")))
    errors = []
    for ranks in (1, 2, 8):
        # As they are sent: outputs in bfloat16, LSE in float32.
        packed = [run_on(k[:, :, rank::ranks], v[:, :, rank::ranks], k_at[:, rank::ranks]) for rank in range(ranks)]
        merged = merge_all(unpack(jnp.stack(packed), jnp.dtype("bfloat16")))
        errors.append(np.abs(merged.out - exact).max() / np.abs(exact).max())
    # bfloat16 has eight bits: inputs and outputs are rounded to 1 part in 256, however many there are.
    assert max(errors) < 2**-7
    assert max(errors) < 1.5 * errors[0]
