from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from uniform import uniform_control_violations

SIZES = {"dp": 2, "cp": 1, "tp": 4}
RING = [(rank, (rank + 1) % 4) for rank in range(4)]


def violations(body: Callable[..., Any], columns: str | tuple[str, ...] = "tp", **options: Any) -> list[str]:
    """Those of a shard_map over dp 2 x cp 1 x tp 4 of an [8, 8] array, its rows split over dp."""
    mesh = AbstractMesh(tuple(SIZES.values()), tuple(SIZES), axis_types=(AxisType.Auto,) * 3)
    spec = P("dp", columns)
    program = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, **options)
    return uniform_control_violations(jax.make_jaxpr(jax.jit(program))(jnp.zeros((8, 8))), SIZES)


def shift(x: jax.Array) -> jax.Array:
    with jax.named_scope("attention:ring"):
        return lax.ppermute(x, "tp", RING)


def test_a_collective_under_a_cond_that_ranks_decide_differently_is_found() -> None:
    assert violations(lambda x: lax.cond(jnp.sum(x) > 0, shift, lambda x: x, x)) == [
        "ppermute over tp in attention:ring: under a cond whose predicate varies over dp, tp"
    ]


def test_agreement_within_the_groups_of_the_collective_is_not_enough() -> None:
    def body(x: jax.Array) -> jax.Array:
        return lax.cond(lax.psum(jnp.sum(x), "tp") > 0, shift, lambda x: x, x)

    assert violations(body) == ["ppermute over tp in attention:ring: under a cond whose predicate varies over dp"]


def test_a_predicate_that_is_the_same_on_the_whole_mesh_is_fine() -> None:
    def body(x: jax.Array) -> jax.Array:
        return lax.cond(lax.psum(jnp.sum(x), ("dp", "tp")) > 0, shift, lambda x: x, x)

    assert violations(body) == []


def test_an_axis_of_size_1_tells_no_ranks_apart() -> None:
    def body(x: jax.Array) -> jax.Array:
        return lax.cond(lax.psum(jnp.sum(x), ("dp", "tp")) > 0, shift, lambda x: x, x)

    assert violations(body, ("cp", "tp")) == []


def test_a_loop_whose_trip_count_differs_is_found_and_one_that_takes_the_maximum_is_fine() -> None:
    def rounds(agree: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
        def body(x: jax.Array) -> jax.Array:
            count = agree(jnp.sum(x).astype(jnp.int32))
            return lax.fori_loop(0, count, lambda _, x: shift(x), x)

        return body

    assert violations(rounds(lambda count: count)) == [
        "ppermute over tp in attention:ring: in a loop whose trip count varies over dp, tp"
    ]
    assert violations(rounds(lambda count: lax.pmax(count, ("dp", "tp")))) == []


def test_a_condition_may_itself_agree_by_a_collective() -> None:
    def body(x: jax.Array) -> jax.Array:
        return lax.while_loop(lambda x: lax.pmax(jnp.max(x), ("dp", "tp")) > 0, shift, x)

    assert violations(body) == []


def test_a_condition_that_agrees_within_a_group_is_found_with_what_it_sends() -> None:
    def body(x: jax.Array) -> jax.Array:
        return lax.while_loop(lambda x: lax.pmax(jnp.max(x), "tp") > 0, lambda x: x - 1, x)

    assert violations(body) == ["all_reduce over tp in no scope: in a loop whose trip count varies over dp"]


def test_what_stands_deeper_in_a_branch_is_found() -> None:
    def ring(x: jax.Array) -> jax.Array:
        return lax.scan(lambda x, _: (jax.jit(shift)(x), None), x, None, length=3)[0]

    (line,) = violations(lambda x: lax.switch(lax.axis_index("tp"), [lambda x: x, jax.checkpoint(ring)], x))
    assert line.endswith("under a cond whose predicate varies over tp")


def test_a_uniform_branch_inside_a_branch_that_is_not_stays_a_violation() -> None:
    def inner(x: jax.Array) -> jax.Array:
        return lax.cond(lax.psum(jnp.sum(x), ("dp", "tp")) > 0, shift, lambda x: x, x)

    found = violations(lambda x: lax.cond(jnp.sum(x) > 0, inner, lambda x: x, x))
    assert [line.split(": under")[0] for line in found] == [
        "all_reduce over dp, tp in no scope",
        "ppermute over tp in attention:ring",
    ]


@pytest.mark.parametrize(
    "body",
    [
        lambda x: lax.cond(jnp.sum(x) > 0, jnp.sin, jnp.cos, x),
        lambda x: lax.while_loop(lambda x: jnp.max(x) > 0, lambda x: x - 1, x),
        lambda x: lax.fori_loop(0, 3, lambda _, x: shift(x), x),
        shift,
    ],
    ids=["local branches", "local loop", "fixed trip count", "no control flow"],
)
def test_there_is_nothing_to_find_in(body: Callable[[jax.Array], jax.Array]) -> None:
    assert violations(body) == []


def test_without_types_nothing_is_taken_on_trust() -> None:
    def body(x: jax.Array) -> jax.Array:
        return lax.cond(lax.psum(jnp.sum(x), ("dp", "tp")) > 0, shift, lambda x: x, x)

    (line,) = violations(body, check_vma=False)
    assert "has no type (check_vma=False)" in line
