"""Collectives do what they say on rank-coded values, and are refused at trace time where they would count twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpar.collectives import (
    Pieces,
    all_gather,
    all_max,
    all_min,
    all_sum,
    all_to_all,
    enter,
    leave,
    pick_rows,
    ragged_all_to_all,
    rank_index,
    scatter_sum,
    shift,
    sum_in_groups,
    varying_axes,
)
from jaxpar.collectives.reduction import NATIVE
from jaxpar.devices import abstract_mesh, ensure_devices, make_mesh
from jaxpar.errors import PlanError
from jaxpar.ledger.trace import count_collectives
from jaxpar.mesh import AXES, MeshSpec
from jaxpar.plan import Sublayer

Local = Callable[[jax.Array], jax.Array]
COLLECTIVES = [all_sum, all_max, all_min, scatter_sum, all_gather, shift]


def trace(body: Local, spec: P, out: P, sizes: str = "dp=2,tp=4") -> jax.extend.core.ClosedJaxpr:
    """The jaxpr of `body` on an [8, 8] array split as `spec` says; no device is needed."""
    mesh = abstract_mesh(MeshSpec.parse(sizes))
    return jax.make_jaxpr(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=out))(jnp.zeros((8, 8)))


def refusal(body: Local, spec: P) -> str:
    with pytest.raises(PlanError) as raised:
        trace(body, spec, P())
    return str(raised.value)


def on_ranks(body: Local, mesh: str, out: P) -> np.ndarray:
    """What every rank has after `body` of its rank-coded [4, 3]: entries 100 * rank, + 10 * row, + column."""
    spec = MeshSpec.parse(mesh)
    devices = make_mesh(spec, ensure_devices(spec))
    x = 100.0 * np.arange(spec.size)[:, None, None] + 10.0 * np.arange(4)[:, None] + np.arange(3)
    everywhere = P(spec.active(AXES))
    program = jax.shard_map(lambda x: body(x[0]), mesh=devices, in_specs=everywhere, out_specs=out)
    return np.asarray(jax.jit(program)(x.astype(np.float32)))


# Values


@pytest.mark.parametrize("mesh", ["dp=2,tp=4", "dp=4,tp=2"])
def test_sums_and_maxima_run_within_each_group_of_the_named_axis(mesh: str) -> None:
    spec = MeshSpec.parse(mesh)
    codes = 100.0 * np.arange(8).reshape(spec.dp, spec.tp)
    base = 10.0 * np.arange(4)[:, None] + np.arange(3)
    total = on_ranks(lambda x: all_sum(x, ("tp",)), mesh, P("dp"))
    np.testing.assert_array_equal(total.reshape(spec.dp, 4, 3), codes.sum(1)[:, None, None] + spec.tp * base)
    top = on_ranks(lambda x: all_max(x, ("tp",)), mesh, P("dp"))
    np.testing.assert_array_equal(top.reshape(spec.dp, 4, 3), codes.max(1)[:, None, None] + base)
    low = on_ranks(lambda x: all_min(x, ("dp",)), mesh, P("tp"))
    np.testing.assert_array_equal(low.reshape(spec.tp, 4, 3), codes.min(0)[:, None, None] + base)


@pytest.mark.parametrize("dimension", [0, 1])
@pytest.mark.parametrize(("mesh", "groups"), [("dp=2,tp=4", [[0, 1], [2, 3]]), ("tp=6", [[0, 1, 2], [3, 4, 5]])])
def test_a_sum_in_groups_of_an_axis_is_on_every_rank_of_each_whatever_divides_the_array(
    mesh: str, groups: list[list[int]], dimension: int
) -> None:
    spec = MeshSpec.parse(mesh)
    codes = np.arange(spec.size).reshape(-1, len(groups[0]))
    found = on_ranks(lambda x: sum_in_groups(x, ("tp",), groups, dimension)[None], mesh, P(spec.active(AXES)))
    base = 10.0 * np.arange(4)[:, None] + np.arange(3)
    expected = np.repeat(100.0 * codes.sum(axis=1), len(groups[0]))[:, None, None] + len(groups[0]) * base
    np.testing.assert_array_equal(found, expected)


def test_a_sum_over_two_axes_is_over_all_their_ranks() -> None:
    np.testing.assert_array_equal(
        on_ranks(lambda x: all_sum(x, ("dp", "tp")), "dp=2,tp=4", P()),
        2800 + 8 * (10.0 * np.arange(4)[:, None] + np.arange(3)),
    )


@pytest.mark.parametrize("mesh", ["dp=2,tp=4", "dp=4,tp=2"])
def test_a_reduce_scatter_then_a_gather_is_the_sum(mesh: str) -> None:
    summed = on_ranks(lambda x: all_sum(x, ("tp",)), mesh, P("dp"))
    scattered = on_ranks(lambda x: scatter_sum(x, ("tp",)), mesh, P(("dp", "tp")))
    np.testing.assert_array_equal(scattered, summed)


def test_a_gather_lays_tokens_side_by_side_in_the_order_of_the_ranks() -> None:
    # The type of a gather's result varies over tp still, so every rank's copy comes out.
    gathered = on_ranks(lambda x: all_gather(x, ("tp",)), "dp=2,tp=4", P(("dp", "tp")))
    rows = gathered.reshape(2, 4, 4, 4, 3)
    for dp in range(2):
        for tp in range(4):
            np.testing.assert_array_equal(rows[dp, tp, :, 0, 0], 100.0 * (4 * dp + np.arange(4)))


def test_a_sublayer_gathers_tokens_on_entering_and_scatters_their_sum_on_leaving() -> None:
    split = Sublayer(gather=("tp",), sum=(), scatter=("tp",))

    def body(x: jax.Array) -> jax.Array:
        # Four ranks gather the same tokens, and make a part of the result of them each.
        return leave(enter(x, split, 16) * (1.0 + rank_index(("tp",))), split)

    np.testing.assert_array_equal(on_ranks(body, "tp=4", P("tp")), on_ranks(lambda x: 10 * x, "tp=4", P("tp")))


def test_what_a_sublayer_enters_with_is_known_to_be_the_same_on_the_ranks_that_it_gathered_from() -> None:
    split = Sublayer(gather=("tp",), sum=(), scatter=("tp",))
    whole = on_ranks(lambda x: enter(x, split, 16), "dp=2,tp=4", P("dp"))
    np.testing.assert_array_equal(whole, on_ranks(lambda x: x, "dp=2,tp=4", P(("dp", "tp"))))


@pytest.mark.parametrize("tokens", [1, 2, 3, 13])
def test_tokens_that_do_not_divide_are_filled_up_on_leaving_and_cut_on_entering(tokens: int) -> None:
    split = Sublayer(gather=("tp",), sum=(), scatter=("tp",))

    def body(x: jax.Array) -> jax.Array:
        # Every rank has a part of the same `tokens` rows; their sum goes round, and comes back on every rank.
        part = jnp.concatenate([x] * 4)[:tokens]
        back = enter(leave(part, split), split, tokens)
        return jnp.pad(back, ((0, 16 - tokens), (0, 0))) - jnp.pad(all_sum(part, ("tp",)), ((0, 16 - tokens), (0, 0)))

    assert (on_ranks(body, "tp=4", P("tp")) == 0).all()


def test_a_row_is_picked_from_the_rank_that_holds_it() -> None:
    rows = np.asarray([0, 3, 4, 13, 15])
    picked = on_ranks(lambda x: pick_rows(x, jnp.asarray(rows), ("dp", "tp")), "dp=2,tp=2", P())
    np.testing.assert_array_equal(picked[:, 0], 100 * (rows // 4) + 10 * (rows % 4))


def test_a_shift_brings_what_the_previous_rank_has_also_within_groups() -> None:
    moved = on_ranks(lambda x: shift(x, ("tp",)), "tp=4", P("tp"))
    assert moved[::4, 0].tolist() == [300, 0, 100, 200]
    moved = on_ranks(lambda x: shift(x, ("tp",), [[0, 2], [1, 3]]), "tp=4", P("tp"))
    assert moved[::4, 0].tolist() == [200, 300, 0, 100]


def test_an_all_to_all_gives_each_rank_its_part_of_every_rank_also_within_groups() -> None:
    dealt = on_ranks(lambda x: all_to_all(x, ("tp",), 0, 1), "tp=4", P("tp"))
    # Rank r has row r of every rank: its columns are those of rank 0, 1, 2 and 3.
    assert dealt[:, ::3].tolist() == [[10 * r + 100 * rank for rank in range(4)] for r in range(4)]
    dealt = on_ranks(lambda x: all_to_all(x, ("tp",), 0, 1, [[0, 1], [2, 3]]), "tp=4", P("tp"))
    assert dealt[::2, ::3].tolist() == [[0, 100], [20, 120], [200, 300], [220, 320]]


def a_ragged_exchange(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Of [4, 3] on four ranks: rank r sends itself and each rank after it one row, which stands there as the r-th."""
    rank, to = jax.lax.axis_index(axes), jnp.arange(4)
    pieces = Pieces(
        starts=to,
        sizes=(to >= rank).astype(jnp.int32),
        targets=jnp.full(4, rank),
        arriving=(to <= rank).astype(jnp.int32),
    )
    return ragged_all_to_all(x, pieces, 6, axes)


@pytest.mark.parametrize(("mesh", "axes"), [("tp=4", ("tp",)), ("dp=2,tp=2", ("dp", "tp"))])
def test_a_ragged_all_to_all_puts_pieces_of_any_sizes_where_they_are_wanted_and_zeros_elsewhere(
    mesh: str, axes: tuple[str, ...]
) -> None:
    dealt = on_ranks(lambda x: a_ragged_exchange(x, axes), mesh, P(axes)).reshape(4, 6, 3)
    for rank in range(4):
        rows = [100 * source + 10 * rank for source in range(rank + 1)]
        np.testing.assert_array_equal(dealt[rank, : rank + 1], np.array(rows)[:, None] + np.arange(3))
        assert not dealt[rank, rank + 1 :].any()


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_a_ragged_all_to_all_is_the_accelerators_own_and_over_several_axes_too(platform: str) -> None:
    spec = MeshSpec(dp=2, tp=2)
    axes = ("dp", "tp")
    program = jax.shard_map(
        lambda x: a_ragged_exchange(x, axes),
        mesh=make_mesh(spec, ensure_devices(spec)),
        in_specs=P(axes),
        out_specs=P(axes),
    )
    lowered = jax.jit(program).trace(jnp.zeros((16, 3))).lower(lowering_platforms=(platform,)).as_text()
    assert "@ragged_all_to_all" in lowered and "stablehlo.all_to_all" not in lowered


def test_an_all_to_all_of_copies_is_refused() -> None:
    assert "all_to_all over tp of an array that is the same on every rank of tp" in refusal(
        lambda x: all_to_all(x, ("tp",), 0, 1), P("dp")
    )


def test_a_sublayer_whose_tokens_are_not_split_leaves_by_the_plans_all_reduce() -> None:
    whole, used = Sublayer(gather=(), sum=("tp",), scatter=()), []

    def all_reduce(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        used.append(axes)
        return all_sum(x, axes)

    left = on_ranks(lambda x: leave(enter(x, whole, 4), whole, replace(NATIVE, all_reduce=all_reduce)), "tp=4", P())
    np.testing.assert_array_equal(left, on_ranks(lambda x: all_sum(x, ("tp",)), "tp=4", P()))
    assert set(used) == {("tp",)}


# The check when a program is traced


def test_over_no_axes_every_collective_is_the_identity_and_leaves_no_equation() -> None:
    for collective in COLLECTIVES:
        jaxpr = trace(lambda x, f=collective: f(x, ()), P("dp", "tp"), P("dp", "tp"))
        assert count_collectives(jaxpr) == 0
        x = jnp.arange(3.0)
        assert collective(x, ()) is x


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_collective_over_copies_is_refused_naming_the_axes(collective: Callable[..., jax.Array]) -> None:
    said = refusal(lambda x: collective(x, ("dp", "tp")), P("dp"))
    assert said == (
        f"{collective.__name__} over dp, tp of an array that is the same on every rank of tp: "
        "it would be counted more than once; reduce each partial sum once"
    )


def test_a_second_sum_of_a_finished_sum_is_refused() -> None:
    assert "all_sum over tp of an array that is the same on every rank of tp" in refusal(
        lambda x: all_sum(all_sum(x, ("tp",)), ("tp",)), P("dp", "tp")
    )


def test_a_reduce_scatter_of_a_finished_sum_is_refused() -> None:
    assert "scatter_sum over tp of an array that is the same on every rank of tp" in refusal(
        lambda x: scatter_sum(all_sum(x, ("tp",)), ("tp",)), P("dp", "tp")
    )


def test_a_gather_of_a_finished_sum_is_refused() -> None:
    assert "all_gather over tp of an array that is the same on every rank of tp" in refusal(
        lambda x: all_gather(all_sum(x, ("tp",)), ("tp",)), P("dp", "tp")
    )


def test_the_sum_of_replicated_states_is_refused_as_a_whole_though_one_axis_is_right() -> None:
    assert "over dp, tp of an array that is the same on every rank of dp" in refusal(
        lambda x: all_sum(x, ("dp", "tp")), P(None, "tp")
    )


def test_the_check_reads_the_type_and_so_follows_values_through_arithmetic() -> None:
    seen = []

    def body(x: jax.Array) -> jax.Array:
        part = x @ x.T
        seen.extend([varying_axes(part), varying_axes(all_sum(part, ("tp",)) + 1)])
        return all_sum(part, ("tp",))

    trace(body, P("dp", "tp"), P("dp"))
    assert seen == [{"dp", "tp"}, {"dp"}]


def test_an_axis_of_size_1_is_still_a_sum_that_the_text_holds_so_plans_must_not_name_it() -> None:
    jaxpr = trace(lambda x: all_sum(x, ("tp",)), P("dp", "tp"), P("dp"), "dp=2")
    assert count_collectives(jaxpr) == 1


def test_a_mesh_of_devices_and_an_abstract_one_are_checked_alike() -> None:
    spec = MeshSpec(tp=2)
    mesh: Mesh = make_mesh(spec, ensure_devices(spec))
    with pytest.raises(PlanError, match="all_sum over tp"):
        jax.make_jaxpr(jax.shard_map(lambda x: all_sum(x, ("tp",)), mesh=mesh, in_specs=P(), out_specs=P()))(1.0)
