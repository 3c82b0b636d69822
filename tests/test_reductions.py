"""Every way to add up what ranks have: the same bits on every rank, within the stated bound, for any length."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from jaxpar.collectives import (
    all_sum,
    assert_same,
    comparing_ranks,
    ring_all_gather,
    ring_all_to_all,
    ring_reduce_scatter,
    to_varying,
)
from jaxpar.collectives.bounds import rounding
from jaxpar.collectives.reduction import NATIVE, Reduction
from jaxpar.devices import abstract_mesh, ensure_devices, make_mesh
from jaxpar.errors import PlanError
from jaxpar.ledger.trace import count_collectives, trace_traffic
from jaxpar.mesh import AXES, MeshSpec
from jaxpar.plan import Plan
from jaxpar.registry import STRATEGIES, find

NAMES = [strategy.name for strategy in STRATEGIES if strategy.sublayer == "all_reduce"]
LENGTHS = (1, 7, 128, 1000)
# Axes that ranks are split over, and devices of a node.
MESHES = {"tp=2": 1, "tp=3": 1, "tp=4": 2, "tp=8": 2, "cp=2,tp=4": 4}
PROGRAMS = [
    pytest.param(name, mesh, dtype, id=f"{name}-{mesh}-{dtype}")
    for name in NAMES
    for mesh in MESHES
    for dtype in ("bfloat16", "float32", "float16")
    # Sixteen bits are what ranks can disagree in; the others run on the mesh that pads most.
    if dtype == "bfloat16" or mesh == "tp=3"
]
KINDS = ("even", "wide", "tiny", "subnormal", "zeros", "huge")


def reduction_of(name: str, mesh: str) -> Reduction:
    plan = Plan(MeshSpec.parse(mesh), devices_per_node=MESHES[mesh])
    found: Reduction = find("all_reduce", name).run(plan)
    return found


def on_ranks(body: Any, mesh: str) -> Any:
    """`body` of each rank's arrays [1, ...] as one program, with what every rank has after it."""
    spec = MeshSpec.parse(mesh)
    everywhere = P(spec.active(AXES))

    def local(*arrays: jax.Array) -> Any:
        found = body(*(array[0] for array in arrays))
        return jax.tree.map(lambda x: to_varying(x, spec.active(AXES))[None], found)

    devices = make_mesh(spec, ensure_devices(spec))
    return jax.jit(jax.shard_map(local, mesh=devices, in_specs=everywhere, out_specs=everywhere))


@cache
def program(name: str, mesh: str) -> Any:
    """Sums of arrays of all lengths, each made in float32 just before, as a product makes it."""
    reduction, axes = reduction_of(name, mesh), MeshSpec.parse(mesh).active(AXES)

    def body(*arrays: jax.Array) -> list[jax.Array]:
        parts = [(array.astype(jnp.float32) * jnp.float32(1.0)).astype(array.dtype) for array in arrays]
        return [reduction.all_reduce(part, axes) for part in parts]

    return on_ranks(body, mesh)


def values(rng: np.random.Generator, kind: str, ranks: int, length: int, dtype: str) -> np.ndarray:
    """What ranks add up, exactly in `dtype`."""
    x = rng.standard_normal((ranks, length))
    info = jnp.finfo(dtype)
    if kind == "wide":
        x *= np.exp2(rng.integers(-8, 9, x.shape))
    elif kind == "tiny":
        x = np.clip(x, -3, 3) * 0.0006
    elif kind == "subnormal":
        x *= float(info.tiny) / 8
    elif kind == "zeros":
        x[:] = 0
    elif kind == "huge":
        x[rng.integers(ranks), rng.integers(length)] = 1e30 if float(info.max) > 1e30 else 6e4
    return x.astype(info.dtype)


@pytest.mark.parametrize(("name", "mesh", "dtype"), PROGRAMS)
@settings(max_examples=12)
@given(seed=st.integers(0, 2**32 - 1), kind=st.sampled_from(KINDS))
def test_a_sum_has_the_same_bits_on_every_rank_and_lies_within_its_bound(
    name: str, mesh: str, dtype: str, seed: int, kind: str
) -> None:
    rng, ranks = np.random.default_rng(seed), MeshSpec.parse(mesh).size
    parts = [values(rng, kind, ranks, length, dtype) for length in LENGTHS]
    bound = reduction_of(name, mesh).error_bound
    for part, found in zip(parts, map(np.asarray, program(name, mesh)(*parts)), strict=True):
        for rank in range(1, ranks):
            np.testing.assert_array_equal(found[rank].view(np.uint8), found[0].view(np.uint8), err_msg=f"rank {rank}")
        exact = part.astype(np.float64)
        assert (np.abs(found[0].astype(np.float64) - exact.sum(axis=0)) <= bound(exact, dtype)).all()


def test_the_bound_of_a_sum_that_is_rounded_once_does_not_grow_with_the_ranks_and_that_of_a_tree_with_their_log() -> (
    None
):
    def in_units(name: str, ranks: int) -> float:
        bound = reduction_of(name, "tp=8").error_bound(np.ones((ranks, 1)), "bfloat16")[0]
        return round(bound / ranks / 2**-8)

    assert [in_units("one_shot", ranks) for ranks in (2, 8, 64)] == [1, 1, 1]
    assert [in_units("tree", ranks) for ranks in (2, 8, 64)] == [1, 3, 6]
    assert [in_units("psum", ranks) for ranks in (2, 8, 16)] == [2, 8, 16]


@pytest.mark.parametrize(("name", "step"), [("int8", 1 / 254), ("fp8", 1 / 28)])
def test_the_bound_of_codes_grows_with_the_ranks_as_the_sum_does_and_a_huge_value_costs_its_own_block(
    name: str, step: float
) -> None:
    bound = reduction_of(name, "tp=2").error_bound
    two, eight = (bound(np.ones((ranks, 256)), "float32")[0] for ranks in (2, 8))
    assert two / 2 == pytest.approx(2 * step, rel=step) and eight / two == pytest.approx(4, rel=1e-4)
    huge = np.ones((2, 256))
    huge[0, 5] = 1e30
    assert bound(huge, "float32")[200] == bound(np.ones((2, 256)), "float32")[200]
    assert bound(huge, "float32")[6] == pytest.approx(2 * step * 1e30, rel=step)


def test_errors_of_codes_come_within_a_factor_of_ten_of_their_bound() -> None:
    part = values(np.random.default_rng(0), "even", 8, 1000, "float32")
    for name in ("int8", "fp8"):
        found = np.asarray(program(name, "tp=8")(*[part] * 4)[0])[0]
        bound = reduction_of(name, "tp=8").error_bound(part.astype(np.float64), "float32")
        assert (np.abs(found - part.sum(axis=0, dtype=np.float64)) / bound).max() > 0.1


@pytest.mark.parametrize("name", ["psum", "ring", "int8", "fp8"])
@pytest.mark.parametrize("mesh", ["tp=3", "cp=2,tp=4"])
def test_the_two_halves_of_a_sum_make_the_sum(name: str, mesh: str) -> None:
    reduction, spec = reduction_of(name, mesh), MeshSpec.parse(mesh)
    axes = spec.active(AXES)

    def body(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        part = reduction.reduce_scatter(x, axes)
        return part, reduction.all_gather(part, axes)

    x = np.random.default_rng(0).standard_normal((spec.size, spec.size * 2, 5)).astype(np.float32)
    part, whole = map(np.asarray, on_ranks(body, mesh)(x))
    bound = reduction.error_bound(x.astype(np.float64), np.float32).max()
    total = x.sum(axis=0, dtype=np.float64)
    assert np.abs(part.reshape(total.shape) - total).max() <= bound
    assert np.abs(whole - total).max() <= bound
    assert all((rank.view(np.uint8) == whole[0].view(np.uint8)).all() for rank in whole)


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_the_codes_of_a_row_are_its_own_whatever_the_rows_beside_it_hold(name: str) -> None:
    reduction, ranks, axes = reduction_of(name, "tp=3"), 3, ("tp",)

    def body(alone: jax.Array, rows: jax.Array) -> tuple[jax.Array, ...]:
        halves = reduction.all_gather(reduction.reduce_scatter(rows, axes), axes)
        return reduction.all_reduce(alone, axes), reduction.all_reduce(rows, axes), halves

    # Rows of no whole blocks of 128 values; the model SmolLM2 has 576.
    for width in (5, 576):
        run = on_ranks(body, "tp=3")
        row = np.random.default_rng(0).standard_normal((ranks, width)).astype(np.float32)
        exact = row.astype(np.float64)
        for beside in (0, 1e30, np.nan, np.inf):
            rows = np.stack([np.full_like(row, beside), row, np.full_like(row, beside)], axis=1)
            alone, *found = map(np.asarray, run(row, rows))
            assert (np.abs(alone[0] - exact.sum(axis=0)) <= reduction.error_bound(exact, np.float32)).all()
            for sums in found:
                np.testing.assert_array_equal(sums[:, 1].view(np.uint8), alone.view(np.uint8))


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_the_bytes_of_codes_are_the_traced_ones_for_rows_of_any_width(name: str) -> None:
    reduction, sizes = reduction_of(name, "tp=4"), {"tp": 4}
    for rows, width in ((1, 1), (3, 7), (4, 128), (1, 129), (8, 576)):
        for operation in ("all_reduce", "all_gather", "reduce_scatter") if rows % 4 == 0 else ("all_reduce",):
            body = partial(getattr(reduction, operation), axes=("tp",))
            found = trace_traffic(
                trace(body, P("tp") if operation == "reduce_scatter" else P(), (4 * rows, width)), sizes
            )
            said = reduction.messages(operation, rows, width, 4, sizes)
            assert [(row.collective, row.message_bytes) for row in found] == [
                (one.collective, one.size) for one in said
            ]


def test_the_bound_of_codes_is_that_of_the_blocks_of_each_row() -> None:
    bound = reduction_of("int8", "tp=2").error_bound
    rows = np.ones((2, 3, 576))
    rows[:, 1, 575] = 1e30
    found, ones = bound(rows, np.float32), bound(np.ones((2, 576)), np.float32)
    assert (found[[0, 2]] == ones).all()
    # Five blocks of a row, of 116 values.
    assert (found[1, :464] == ones[:464]).all() and (found[1, 464:] > 1e27).all()


def test_over_no_axes_every_sum_and_half_is_the_identity() -> None:
    x = jnp.arange(6.0).reshape(2, 3)
    for name in NAMES:
        reduction = reduction_of(name, "tp=4")
        assert all(operation(x, ()) is x for operation in (
            reduction.all_reduce, reduction.reduce_scatter, reduction.all_gather))  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_sum_of_a_finished_sum_is_refused(name: str) -> None:
    reduction = reduction_of(name, "tp=4")

    def twice(x: jax.Array) -> jax.Array:
        return reduction.all_reduce(all_sum(x, ("tp",)), ("tp",))

    with pytest.raises(PlanError, match="of an array that is the same on every rank of tp"):
        trace(twice, P())


def trace(body: Any, out: P, shape: tuple[int, int] = (8, 2)) -> jax.extend.core.ClosedJaxpr:
    mesh = abstract_mesh(MeshSpec(tp=4))
    return jax.make_jaxpr(jax.shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=out))(jnp.zeros(shape))


def test_one_shot_sends_half_as_many_times_the_bytes_of_two_shots_as_there_are_ranks_in_half_the_steps() -> None:
    for ranks in (2, 4, 8):
        plan = Plan(MeshSpec(tp=ranks))
        sent, steps = {}, {}
        for name in ("one_shot", "two_shot", "psum", "ring"):
            rows = traffic_of(name, plan, 64)
            sent[name], steps[name] = sum(row.sent_bytes for row in rows), sum(row.steps for row in rows)
        assert sent["two_shot"] == sent["psum"] == sent["ring"]
        assert sent["one_shot"] / sent["two_shot"] == ranks / 2
        assert 2 * steps["one_shot"] == steps["two_shot"] == steps["psum"]
        assert steps["ring"] == 2 * (ranks - 1) * steps["one_shot"]


def traffic_of(name: str, plan: Plan, lanes: int) -> list[Any]:
    """The sums of one decode step of a model of one layer, hidden size 4096."""
    from test_registry import CONFIG

    from jaxpar.strategies import Step

    config = CONFIG.__class__(**{**CONFIG.__dict__, "hidden_size": 4096, "num_hidden_layers": 1, "windows": (None,)})
    return find("all_reduce", name).traffic(Step(config, plan, "decode", lanes=lanes, tokens=1, keys=16))


# Rings


@pytest.mark.parametrize(("mesh", "axes"), [("tp=3", ("tp",)), ("dp=2,tp=4", ("tp",)), ("dp=2,tp=2", ("dp", "tp"))])
def test_rings_bring_what_the_backends_collectives_bring(mesh: str, axes: tuple[str, ...]) -> None:
    spec = MeshSpec.parse(mesh)
    group = spec.extent(axes)

    def body(x: jax.Array) -> tuple[jax.Array, ...]:
        return ring_reduce_scatter(x, axes), ring_all_gather(x[0], axes), ring_all_to_all(x, axes)

    x = np.arange(spec.size * group * 2, dtype=np.float32).reshape(spec.size, group, 2)
    scattered, gathered, dealt = map(np.asarray, on_ranks(body, mesh)(x))
    for rank in range(spec.size):
        first, place = rank // group * group, rank % group
        ranks = x[first : first + group]
        np.testing.assert_array_equal(scattered[rank], ranks.sum(axis=0)[place])
        np.testing.assert_array_equal(gathered[rank], ranks[:, 0])
        np.testing.assert_array_equal(dealt[rank], ranks[:, place])


def test_what_is_no_float_goes_around_a_ring_as_it_is() -> None:
    x = np.arange(3, dtype=np.int32)[:, None]
    gathered = np.asarray(on_ranks(lambda x: ring_all_gather(x, ("tp",)), "tp=3")(x))
    assert (gathered[..., 0] == np.arange(3)).all()


# assert_same


def circulated(x: jax.Array) -> jax.Array:
    """Through a scan, whose carry is varying, and back to the type of the same."""
    again = jax.lax.scan(lambda c, _: (to_varying(assert_same(c, ("tp",)), ("tp",)), None), x, None, length=2)[0]
    return jax.vmap(lambda row: assert_same(row, ("tp",)))(again)


def test_what_is_said_to_be_the_same_is_so_typed_and_sends_nothing() -> None:
    assert count_collectives(trace(circulated, P())) == 0
    with pytest.raises(PlanError, match="assert_same over tp of an array that is the same on every rank of tp"):
        trace(lambda x: assert_same(circulated(x), ("tp",)), P())


def test_ranks_that_differ_become_nan_where_they_do_while_ranks_are_compared_and_only_then() -> None:
    run = on_ranks(circulated, "tp=4")
    x = np.tile(np.float32([[1], [2], [3]]), (4, 1, 1))
    broken = x.copy()
    broken[2, 1] = np.nextafter(np.float32(2), np.float32(3))
    with comparing_ranks():
        assert np.isfinite(run(x)).all()
        assert np.isnan(run(broken))[..., 0].tolist() == [[False, True, False]] * 4
    assert np.isfinite(run(broken)).all()


@pytest.mark.parametrize("name", ["ring", "tree", "two_level"])
def test_sums_that_are_put_together_by_hand_stand_the_comparison(name: str) -> None:
    reduction = reduction_of(name, "tp=4")
    x = np.random.default_rng(0).standard_normal((4, 7)).astype(jnp.bfloat16)
    with comparing_ranks():
        assert np.isfinite(
            np.asarray(on_ranks(lambda x: reduction.all_reduce(x, ("tp",)), "tp=4")(x), np.float32)
        ).all()


def test_the_backends_own_sum_states_the_bound_of_any_order() -> None:
    parts = np.ones((4, 1))
    assert NATIVE.error_bound(parts, "float32") == rounding(parts, "float32", 4)
