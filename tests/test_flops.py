from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from jaxpar.ledger.flops import Flops, trace_flops


def flops(function: Callable[..., Any], *shapes: tuple[int, ...]) -> list[Flops]:
    return trace_flops(jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)))


def total(function: Callable[..., Any], *shapes: tuple[int, ...]) -> int:
    (row,) = flops(function, *shapes)
    return row.flops


@pytest.mark.parametrize(
    ("formula", "left", "right", "multiply_adds"),
    [
        ("mk,kn->mn", (3, 5), (5, 7), 3 * 5 * 7),
        ("bmk,bnk->bmn", (2, 3, 5), (2, 7, 5), 2 * 3 * 5 * 7),
        ("bqhd,bkhd->bhqk", (2, 3, 4, 5), (2, 7, 4, 5), 2 * 4 * 3 * 7 * 5),
        ("ij,ij->", (3, 5), (3, 5), 3 * 5),
        ("i,j->ij", (3,), (5,), 3 * 5),
    ],
)
def test_a_product_is_two_flops_for_each_multiply_add(
    formula: str, left: tuple[int, ...], right: tuple[int, ...], multiply_adds: int
) -> None:
    assert total(lambda x, y: jnp.einsum(formula, x, y), left, right) == 2 * multiply_adds


@pytest.mark.parametrize("groups", [1, 2])
def test_a_convolution_sums_over_its_kernel_and_the_features_of_its_group(groups: int) -> None:
    def convolve(image: jax.Array, kernel: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(image, kernel, (1, 1), "VALID", feature_group_count=groups)

    outputs = 2 * 6 * (8 - 2) * (9 - 2)
    assert total(convolve, (2, 4, 8, 9), (6, 4 // groups, 3, 3)) == 2 * outputs * (4 // groups) * 3 * 3


def test_a_grouped_product_counts_each_row_for_its_own_group() -> None:
    def grouped(rows: jax.Array, experts: jax.Array) -> jax.Array:
        return lax.ragged_dot(rows, experts, jnp.array([3, 0, 8], jnp.int32))

    assert total(grouped, (11, 5), (3, 5, 7)) == 2 * 11 * 5 * 7


def test_elementwise_work_is_not_counted() -> None:
    assert flops(lambda x: jax.nn.softmax(jnp.exp(x)) * x, (8, 8)) == []


def test_work_is_told_apart_by_sublayer_and_what_has_none_is_unscoped() -> None:
    def layer(x: jax.Array, weight: jax.Array) -> jax.Array:
        with jax.named_scope("attention:psum"):
            x = x @ weight
        with jax.named_scope("ffn:psum"):
            x = (x @ weight) @ weight
        return x @ weight

    one = 2 * 3 * 5 * 5
    assert flops(layer, (3, 5), (5, 5)) == [
        Flops("attention", one),
        Flops("ffn", 2 * one),
        Flops("unscoped", one),
    ]


def test_a_rank_does_its_share() -> None:
    mesh = AbstractMesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)

    def matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
        return lax.psum(x @ weight, "tp")

    local = jax.shard_map(matmul, mesh=mesh, in_specs=(P("dp", "tp"), P("tp")), out_specs=P("dp"))
    assert total(jax.jit(local), (6, 8), (8, 5)) * 8 == total(jnp.matmul, (6, 8), (8, 5))


def test_a_scan_multiplies_and_a_cond_takes_the_costlier_branch() -> None:
    def program(x: jax.Array) -> jax.Array:
        def step(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return lax.cond(jnp.sum(x) > 0, lambda x: x @ x @ x, lambda x: x @ x, x), None

        return lax.scan(step, x, None, length=7)[0]

    assert total(program, (3, 3)) == 7 * 2 * (2 * 3 * 3 * 3)


def test_a_loop_with_an_unknown_trip_count_is_counted_per_iteration() -> None:
    def program(x: jax.Array) -> jax.Array:
        with jax.named_scope("moe:gather"), jax.named_scope("loop=rounds"):
            return lax.while_loop(lambda x: jnp.sum(x) > 0, lambda x: x @ x, x)

    assert flops(program, (3, 3)) == [Flops("moe", 54, per="rounds")]


def test_a_derivative_costs_two_products_more_and_a_third_where_it_computes_again() -> None:
    def loss(x: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(x @ weight))

    forward = total(loss, (3, 5), (5, 7))
    assert total(jax.grad(loss, argnums=(0, 1)), (3, 5), (5, 7)) == 3 * forward
    assert total(jax.grad(jax.checkpoint(loss), argnums=(0, 1)), (3, 5), (5, 7)) == 4 * forward


def test_a_kernel_is_counted_over_its_grid() -> None:
    def kernel(x: Any, y: Any, out: Any) -> None:
        out[...] = x[...] @ y[...]

    def matmul(x: jax.Array, y: jax.Array) -> jax.Array:
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((32, 24), jnp.float32),
            grid=(4, 3),
            in_specs=[pl.BlockSpec((8, 16), lambda i, j: (i, 0)), pl.BlockSpec((16, 8), lambda i, j: (0, j))],
            out_specs=pl.BlockSpec((8, 8), lambda i, j: (i, j)),
        )(x, y)

    assert total(matmul, (32, 16), (16, 24)) == 2 * 32 * 16 * 24
