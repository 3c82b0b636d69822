"""Rows times their own experts' weights, as a core and as an accelerator computes them, against numpy in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxpar.kernels import grouped as kernels
from jaxpar.ledger.flops import trace_flops
from jaxpar.moe import grouped
from jaxpar.moe.grouped import expert_ffn, grouped_flops, grouped_matmul, sort_by_expert
from jaxpar.moe.tiles import TILE_ROWS, computed_rows, each_tile, tile_sizes

ROWS, EXPERTS, INPUTS, OUTPUTS = 210, 6, 12, 7
PLATFORMS = ("core", "accelerator")


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def clamped_swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    gate, up = jnp.minimum(gate, 7), jnp.clip(up, -7, 7)
    return (up + 1) * gate * jax.nn.sigmoid(1.702 * gate)


ragged = kernels._ragged_dot


def careless(rows: jax.Array, other: jax.Array, counts: jax.Array, dims: Any, group: list[int]) -> jax.Array:
    """A kernel that writes anything for rows without an expert, or where it sums over rows reads what they hold."""
    out = ragged(rows, other, counts, dims, group)
    if group:
        return jnp.where((jnp.arange(len(out)) < jnp.sum(counts))[:, None], out, jnp.nan)
    return out + 0 * (jnp.sum(rows) + jnp.sum(other))


def on(platform: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled with the code of a platform; an accelerator's runs on a CPU too, only slowly."""

    def choose(*arrays: Any, default: Callable[..., Any], tpu: Callable[..., Any], gpu: Callable[..., Any]) -> Any:
        return {"core": default, "accelerator": tpu}[platform](*jax.tree.map(jnp.asarray, arrays))

    def run(*arrays: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(grouped, "by_backend", choose)
            patch.setattr(kernels, "by_backend", choose)
            patch.setattr(kernels, "_ragged_dot", careless)
            return function(*arrays)

    return jax.jit(run)


matmul_on = cache(lambda platform: on(platform, grouped_matmul))


def counts_of(rows: int, experts: int = EXPERTS) -> st.SearchStrategy[np.ndarray]:
    """Rows of each expert, few or many, that leave some or no rows without one."""
    cuts = st.lists(st.integers(0, rows), min_size=experts, max_size=experts)
    return cuts.map(lambda cuts: np.diff(sorted(cuts), prepend=0).astype(np.int32))


def one_takes_all(expert: int) -> np.ndarray:
    return np.where(np.arange(EXPERTS) == expert, ROWS, 0).astype(np.int32)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def by_expert(counts: np.ndarray, rows: np.ndarray, of_expert: Callable[[int, np.ndarray], np.ndarray]) -> np.ndarray:
    """`of_expert` of each expert and its rows, in float64, and zeros after them."""
    ends = np.cumsum(counts)
    done = [of_expert(e, rows[ends[e] - counts[e] : ends[e]].astype(float)) for e in range(len(counts))]
    return np.concatenate([*done, np.zeros((len(rows) - ends[-1], done[0].shape[1]))])


def product(rows: np.ndarray, weights: np.ndarray, counts: np.ndarray) -> np.ndarray:
    return by_expert(counts, rows, lambda expert, mine: mine @ weights[expert].astype(float).T)


# Sorting


@given(st.lists(st.integers(-2, EXPERTS + 1), min_size=40, max_size=40))
def test_rows_of_an_expert_stay_in_order_and_those_without_one_come_last(experts: list[int]) -> None:
    order, counts = SORT(np.array(experts, np.int32))
    key = np.where(np.isin(experts, range(EXPERTS)), experts, EXPERTS)
    np.testing.assert_array_equal(order, np.argsort(key, stable=True))
    np.testing.assert_array_equal(counts, np.bincount(key, minlength=EXPERTS + 1)[:EXPERTS])


SORT = jax.jit(lambda experts: sort_by_expert(experts, EXPERTS))


# Tiles


@pytest.mark.parametrize("rows", [1, 2, 5, 16, 64, 127, 128, 4096])
def test_tiles_ascend_and_none_is_larger_than_all_rows(rows: int) -> None:
    sizes = tile_sizes(rows)
    assert sorted(set(sizes)) == list(sizes)
    assert sizes[0] == 1
    assert sizes[-1] == min(rows, TILE_ROWS[-1])


@given(counts_of(ROWS))
@example(one_takes_all(3))
def test_every_row_is_in_one_tile_of_its_expert_and_padding_is_less_than_a_tile_an_expert(counts: np.ndarray) -> None:
    owners, tiles, computed = VISIT(counts)
    experts = np.repeat(np.arange(EXPERTS), counts)
    np.testing.assert_array_equal(owners, np.pad(experts + 1, (0, ROWS - len(experts))))
    assert (tiles == -(-counts // TILE_ROWS[-1])).all()
    assert computed == computed_rows(counts, ROWS)
    # Of 8 rows or more at most half are padding.
    assert computed - len(experts) <= sum(min(max(count, 6), 31) for count in counts if count)


@jax.jit
def VISIT(counts: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of each row the sum of 1 + the expert over its tiles, of each expert the tiles, and the rows of all tiles."""

    def visit(tile: Any, state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        owners, tiles, computed = state
        more = tile.rows(owners) + tile.own * (1 + tile.expert)
        return tile.put(owners, more), tiles.at[tile.expert].add(1), computed + len(tile.own)

    start = jnp.zeros((ROWS, 1), jnp.int32), jnp.zeros(EXPERTS, jnp.int32), jnp.int32(0)
    owners, tiles, computed = each_tile(counts, ROWS, visit, start)
    return owners[:, 0], tiles, computed


# The product


@pytest.mark.parametrize("platform", PLATFORMS)
@given(counts=counts_of(ROWS))
@example(counts=one_takes_all(0))
@example(counts=one_takes_all(EXPERTS - 1))
@example(counts=np.zeros(EXPERTS, np.int32))
def test_each_row_is_multiplied_by_its_own_experts_weights(platform: str, counts: np.ndarray) -> None:
    rows, weights = normal(ROWS, INPUTS), normal(EXPERTS, OUTPUTS, INPUTS, seed=1)
    rows[counts.sum() :] = np.nan
    if platform == "core":
        weights[counts == 0] = np.nan
    found = matmul_on(platform)(rows, weights, counts)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, product(rows, weights, counts), atol=1e-5)


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("rows", [1, 2, 9])
def test_a_few_rows_over_many_experts(rows: int, platform: str) -> None:
    x, weights = normal(rows, INPUTS), normal(16, OUTPUTS, INPUTS, seed=1)
    for chosen in ([15] * rows, range(rows), [0] * (rows - 1)):
        counts = np.bincount(chosen, minlength=16).astype(np.int32)
        np.testing.assert_allclose(matmul_on(platform)(x, weights, counts), product(x, weights, counts), atol=1e-5)


def test_no_rows_give_no_rows() -> None:
    weights, counts = normal(EXPERTS, OUTPUTS, INPUTS), np.zeros(EXPERTS, np.int32)
    assert grouped_matmul(normal(0, INPUTS), weights, counts).shape == (0, OUTPUTS)
    ffn = expert_ffn(normal(0, INPUTS), weights[:, :6], normal(EXPERTS, INPUTS, 3), counts, swiglu)
    assert ffn.shape == (0, INPUTS)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_products_of_bfloat16_are_summed_in_float32(platform: str) -> None:
    rows, weights = (x.astype(jnp.bfloat16) for x in (normal(40, 512), normal(3, OUTPUTS, 512, seed=1)))
    counts = np.array([1, 20, 9], np.int32)
    found = matmul_on(platform)(rows, weights, counts)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, product(rows, weights, counts), atol=1e-4)


# The FFN


def ffn(arrays: list[np.ndarray], counts: np.ndarray, activation: Any) -> np.ndarray:
    rows, gate_up, down, gate_up_bias, down_bias = arrays

    def of_expert(expert: int, mine: np.ndarray) -> np.ndarray:
        both = mine @ gate_up[expert].astype(float).T + gate_up_bias[expert]
        hidden = activation(*np.split(both.astype(np.float32), 2, axis=1))
        return np.asarray(hidden, float) @ down[expert].astype(float).T + down_bias[expert]

    return by_expert(counts, rows, of_expert)


def ffn_arrays(rows: int = 20, width: int = 5) -> list[np.ndarray]:
    shapes = (rows, INPUTS), (4, 2 * width, INPUTS), (4, INPUTS, width), (4, 2 * width), (4, INPUTS)
    return [normal(*shape, seed=seed) for seed, shape in enumerate(shapes)]


FFN_COUNTS = np.array([11, 0, 5, 1], np.int32)


def run_ffn(
    rows: Any, gate_up: Any, down: Any, *biases: Any, counts: np.ndarray = FFN_COUNTS, activation: Any = swiglu
) -> jax.Array:
    return expert_ffn(rows, gate_up, down, counts, activation, *biases)


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("activation", [swiglu, clamped_swiglu])
def test_each_row_goes_through_its_own_experts_ffn(activation: Any, platform: str) -> None:
    arrays = ffn_arrays()
    arrays[0][:5] *= 20  # beyond the limits of the clamped activation
    expected = ffn(arrays, FFN_COUNTS, activation)
    arrays[0][FFN_COUNTS.sum() :] = np.nan
    found = on(platform, lambda *arrays: run_ffn(*arrays, activation=activation))(*arrays)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_an_ffn_without_biases(platform: str) -> None:
    arrays = ffn_arrays()
    expected = ffn([*arrays[:3], np.zeros_like(arrays[3]), np.zeros_like(arrays[4])], FFN_COUNTS, swiglu)
    np.testing.assert_allclose(on(platform, run_ffn)(*arrays[:3]), expected, atol=1e-4)


def test_an_ffn_in_bfloat16_rounds_its_hidden_values_once() -> None:
    arrays = [x.astype(jnp.bfloat16) for x in ffn_arrays()]

    def rounded(gate: jax.Array, up: jax.Array) -> jax.Array:
        return swiglu(gate, up).astype(jnp.bfloat16)

    found = on("core", run_ffn)(*arrays)
    assert found.dtype == jnp.float32
    # A hidden value halfway between two of bfloat16 may be rounded to either.
    np.testing.assert_allclose(found, ffn(arrays, FFN_COUNTS, rounded), atol=2**-5)


# Derivatives


def dense_ffn(rows: Any, gate_up: Any, down: Any, *biases: Any, counts: np.ndarray = FFN_COUNTS) -> jax.Array:
    """With a copy of its expert's weights for every row, for JAX to differentiate."""
    routed = int(counts.sum())
    experts = np.repeat(np.arange(4), counts)
    both = jnp.einsum("ni,noi->no", rows[:routed], gate_up[experts])
    both = both + biases[0][experts] if biases else both
    out = jnp.einsum("ni,noi->no", swiglu(*jnp.split(both, 2, axis=1)), down[experts])
    out = out + biases[1][experts] if biases else out
    return jnp.pad(out, ((0, len(rows) - routed), (0, 0)))


def weighed(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A scalar in which every element of the result counts differently."""

    def total(*arrays: jax.Array) -> jax.Array:
        out = function(*arrays)
        return jnp.sum(out * jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape))

    return total


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("biases", [0, 2])
def test_the_ffn_has_the_gradient_of_a_dense_one(biases: int, platform: str) -> None:
    arrays = ffn_arrays()[: 3 + biases]
    which = tuple(range(len(arrays)))
    expected = jax.grad(weighed(dense_ffn), which)(*arrays)
    arrays[0][FFN_COUNTS.sum() :] = np.nan
    found = on(platform, jax.grad(weighed(run_ffn), which))(*arrays)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_product_has_the_gradient_of_a_dense_one(dtype: str, platform: str) -> None:
    # Enough rows of one expert for several tiles.
    counts = np.array([190, 0, 3, 5], np.int32)
    rows, weights = (x.astype(dtype) for x in (normal(ROWS, INPUTS), normal(4, OUTPUTS, INPUTS, seed=1)))
    experts, routed = np.repeat(np.arange(4), counts), counts.sum()

    def dense(rows: jax.Array, weights: jax.Array) -> jax.Array:
        out = jnp.einsum("ni,noi->no", rows[:routed].astype(jnp.float32), weights.astype(jnp.float32)[experts])
        return jnp.pad(out, ((0, ROWS - routed), (0, 0)))

    expected = jax.grad(weighed(dense), (0, 1))(rows, weights)
    found = on(platform, jax.grad(weighed(lambda *arrays: grouped_matmul(*arrays, counts)), (0, 1)))(rows, weights)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype == dtype
        # In bfloat16 what comes in is rounded, and what goes out.
        tolerance = 1e-5 if dtype == "float32" else 2**-6
        scale = np.abs(other.astype(float)).max()
        np.testing.assert_allclose(one.astype(float), other.astype(float), atol=tolerance * scale)


# On many ranks


def test_ranks_with_different_loads_agree_with_one_device_and_so_do_the_sums_of_their_gradients() -> None:
    mesh = jax.make_mesh((2, 4), ("dp", "ep"), axis_types=(AxisType.Auto,) * 2)
    rows = normal(2 * 12, INPUTS)
    _, gate_up, down, *biases = ffn_arrays()
    # Ranks hold copies of the experts, and over ep the same rows, which they take to be of different experts.
    counts = np.array([[0, 12, 0, 0], [0, 0, 0, 0], [1, 2, 3, 4], [5, 4, 0, 1]] * 2, np.int32).reshape(-1, 4)
    counts[4:] = counts[4:, ::-1]

    def local(rows: jax.Array, counts: jax.Array, *weights: jax.Array) -> jax.Array:
        out = expert_ffn(rows, weights[0], weights[1], counts[0], swiglu, *weights[2:])
        return jax.lax.psum(out, "ep")

    ranks = jax.shard_map(local, mesh=mesh, in_specs=(P("dp"), P(("dp", "ep")), *[P()] * 4), out_specs=P("dp"))

    def one_device(rows: jax.Array, _: Any, *weights: jax.Array) -> jax.Array:
        halves = rows[:12], rows[12:]
        of_ranks = [dense_ffn(halves[rank // 4], *weights, counts=counts[rank]) for rank in range(8)]
        return jnp.concatenate([sum(of_ranks[:4]), sum(of_ranks[4:])])

    arguments = rows, counts, gate_up, down, *biases
    which = (0, 2, 3, 4, 5)
    found = jax.jit(jax.value_and_grad(weighed(ranks), which))(*arguments)
    expected = jax.jit(jax.value_and_grad(weighed(one_device), which))(*arguments)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-3)


# What it costs


def shapes(*arrays: tuple[Any, ...], dtype: Any = jnp.float32) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in arrays]


COUNTS = jax.ShapeDtypeStruct((EXPERTS,), jnp.int32)


@pytest.mark.parametrize("rows", [1, 2, 50, 300])
def test_the_ledger_counts_every_row_for_one_expert_and_a_derivative_twice_more(rows: int) -> None:
    def flops(function: Callable[..., Any], *arguments: Any) -> int:
        (row,) = trace_flops(jax.make_jaxpr(function)(*arguments))
        assert row.per == ""
        return row.flops

    arguments = *shapes((rows, INPUTS), (EXPERTS, OUTPUTS, INPUTS)), COUNTS
    once = grouped_flops(rows, INPUTS, OUTPUTS)
    assert flops(grouped_matmul, *arguments) == once == 2 * rows * INPUTS * OUTPUTS
    assert flops(jax.grad(weighed(grouped_matmul), (0, 1)), *arguments) == 3 * once

    width = 5
    weights = shapes((EXPERTS, 2 * width, INPUTS), (EXPERTS, INPUTS, width))

    def whole(rows: jax.Array, counts: jax.Array, *weights: jax.Array) -> jax.Array:
        return expert_ffn(rows, *weights, counts, swiglu)

    gate_up, down = grouped_flops(rows, INPUTS, 2 * width), grouped_flops(rows, width, INPUTS)
    arguments = arguments[0], COUNTS, *weights
    assert flops(whole, *arguments) == gate_up + down
    # gate and up are computed again.
    assert flops(jax.grad(weighed(whole), (0, 2, 3)), *arguments) == 4 * gate_up + 3 * down


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 2, 40])
def test_a_core_takes_the_weights_of_one_expert_at_a_time(rows: int, dtype: str) -> None:
    experts, width, hidden = 64, 64, 128
    sizes = (rows, hidden), (experts, 2 * width, hidden), (experts, hidden, width)
    arguments = *shapes(*sizes, dtype=dtype), jax.ShapeDtypeStruct((experts,), jnp.int32)
    compiled = jax.jit(lambda *x: expert_ffn(*x, swiglu)).lower(*arguments).compile()
    of_one_expert = 4 * 3 * width * hidden
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * of_one_expert


@pytest.mark.parametrize(("platform", "kernels"), [("tpu", 2), ("cuda", 2), ("cpu", 0)])
def test_accelerators_get_a_grouped_product_and_a_core_gets_none(platform: str, kernels: int) -> None:
    sizes = (ROWS, INPUTS), (EXPERTS, 10, INPUTS), (EXPERTS, INPUTS, 5)
    traced = jax.jit(lambda *x: expert_ffn(*x, swiglu)).trace(*shapes(*sizes), COUNTS)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert text.count('"chlo.ragged_dot"(') == kernels
    assert ("stablehlo.while" in text) == (kernels == 0)
