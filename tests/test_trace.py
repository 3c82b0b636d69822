from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from jaxpar.ledger.scope import scope_of
from jaxpar.ledger.trace import count_collectives, trace_traffic
from jaxpar.ledger.traffic import SENT_BYTES, Traffic, compare, merge

SIZES = {"pp": 1, "dp": 2, "ep": 1, "cp": 1, "tp": 4}


def local(body: Callable[..., Any], *shapes: tuple[int, ...], dtype: Any = jnp.float32, **options: Any) -> Any:
    """The jaxpr of a shard_map over dp 2 x tp 4; its body sees arrays of these local shapes, another on every rank."""
    mesh = AbstractMesh(tuple(SIZES.values()), tuple(SIZES), axis_types=(AxisType.Auto,) * 5)
    everywhere = P(tuple(SIZES))

    def on_every_rank(*arrays: jax.Array) -> Any:
        return jax.tree.map(lambda x: lax.pcast(x, missing(x), to="varying").reshape(1, -1), body(*arrays))

    def missing(x: jax.Array) -> tuple[str, ...]:
        return tuple(SIZES.keys() - jax.typeof(x).manual_axis_type.varying)

    program = jax.shard_map(on_every_rank, mesh=mesh, in_specs=everywhere, out_specs=everywhere, **options)
    arguments = [jax.ShapeDtypeStruct((8 * shape[0], *shape[1:]), dtype) for shape in shapes]
    return jax.make_jaxpr(jax.jit(program))(*arguments)


def rows(body: Callable[..., Any], *shapes: tuple[int, ...], **options: Any) -> list[Traffic]:
    return trace_traffic(local(body, *shapes, **options), SIZES)


# Bytes


def test_one_rank_sends_what_the_algorithm_says() -> None:
    sent = {collective: bytes_of(4096, 4) for collective, bytes_of in SENT_BYTES.items()}
    assert sent == {
        "all_reduce": 6144,
        "reduce_scatter": 3072,
        "all_gather": 12288,
        "all_to_all": 3072,
        "ppermute": 4096,
        "broadcast": 4096,
        "ragged_all_to_all": 4096,
    }


@given(message=st.integers(0, 10**12), ranks=st.integers(1, 4096))
def test_bytes_are_exact_and_only_ever_rounded_up(message: int, ranks: int) -> None:
    exact = 2 * (ranks - 1) * message
    sent = SENT_BYTES["all_reduce"](message, ranks)
    assert exact <= sent * ranks < exact + ranks
    halves = SENT_BYTES["reduce_scatter"](message, ranks) + SENT_BYTES["all_gather"](-(-message // ranks), ranks)
    assert sent <= halves  # a reduce-scatter and an all-gather of padded chunks send no less


@given(message=st.integers(0, 10**12))
def test_a_group_of_one_rank_sends_nothing(message: int) -> None:
    assert {bytes_of(message, 1) for bytes_of in SENT_BYTES.values()} == {0}


def test_llama_3_70b_decodes_64_requests_at_tp_8_with_280_mib_in_160_all_reduces() -> None:
    mesh = AbstractMesh((8,), ("tp",), axis_types=(AxisType.Auto,))

    def layers(x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            for sublayer in ("attention", "ffn"):
                with jax.named_scope(f"{sublayer}:psum"):
                    x = lax.pcast(lax.psum(x, "tp"), "tp", to="varying")
            return x, None

        return lax.scan(layer, x, None, length=80)[0]

    program = jax.shard_map(layers, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))
    traced = trace_traffic(jax.make_jaxpr(program)(jax.ShapeDtypeStruct((8 * 64, 8192), jnp.bfloat16)), {"tp": 8})
    mib = 2**20
    assert traced == [
        Traffic("attention", "psum", "all_reduce", ("tp",), 80, mib, 140 * mib),
        Traffic("ffn", "psum", "all_reduce", ("tp",), 80, mib, 140 * mib),
    ]


# What is counted


def test_every_collective_is_known_with_the_bytes_of_its_local_operand() -> None:
    def body(x: jax.Array) -> tuple[jax.Array, ...]:
        return (
            lax.psum(x, "tp"),
            lax.pmax(x, ("dp", "tp")),
            lax.pmin(x, "dp"),
            lax.all_gather(x, "tp", tiled=True),
            lax.psum_scatter(x, "tp", tiled=True),
            lax.all_to_all(x, "tp", 0, 0, tiled=True),
            lax.ppermute(x, "tp", [(0, 1)]),
        )

    assert [(row.collective, row.axes, row.message_bytes, row.sent_bytes) for row in rows(body, (4, 2))] == [
        ("all_reduce", ("tp",), 32, 48),
        ("all_reduce", ("dp", "tp"), 32, 56),
        ("all_reduce", ("dp",), 32, 32),
        ("all_gather", ("tp",), 32, 96),
        ("reduce_scatter", ("tp",), 32, 24),
        ("all_to_all", ("tp",), 32, 24),
        ("ppermute", ("tp",), 32, 32),
    ]


def test_collectives_that_return_to_a_replicated_type_are_counted_like_the_others() -> None:
    def gather(x: jax.Array) -> jax.Array:
        return lax.all_gather(x, "tp", tiled=True, to="invarying")

    (row,) = rows(gather, (3,))
    assert (row.collective, row.message_bytes, row.sent_bytes) == ("all_gather", 12, 36)


@pytest.mark.parametrize("sizes", [(4, 16), (16, 4)])
def test_a_ragged_all_to_all_sends_at_most_the_smaller_of_its_operand_and_its_result(sizes: tuple[int, int]) -> None:
    def body(x: jax.Array, output: jax.Array) -> jax.Array:
        one = jnp.ones((4,), jnp.int32)
        return lax.ragged_all_to_all(x, output, one, one, one, one, axis_name="tp")

    assert rows(body, sizes[:1], sizes[1:]) == [
        Traffic("unscoped", "unscoped", "ragged_all_to_all", ("tp",), 1, 16, 16)
    ]


def test_a_broadcast_passes_the_whole_message_on() -> None:
    (row,) = rows(lambda x: lax.pbroadcast(x, ("tp",), source=0), (4,))
    assert (row.collective, row.sent_bytes) == ("broadcast", 16)


def test_each_operand_of_a_sum_of_several_is_a_message() -> None:
    traced = rows(lambda x, y: lax.psum((x, y), "tp"), (4,), (8,))
    assert [(row.calls, row.message_bytes) for row in traced] == [(1, 16), (1, 32)]


def test_casts_and_indices_send_nothing() -> None:
    assert rows(lambda x: x + lax.axis_index("tp"), (4,)) == []
    assert count_collectives(local(lambda x: x + lax.axis_index("tp"), (4,))) == 0


def test_axes_are_named_in_the_order_of_the_mesh() -> None:
    (row,) = rows(lambda x: lax.psum(x, ("tp", "dp")), (4,))
    assert row.axes == ("dp", "tp")


def test_axes_of_size_1_send_nothing_but_are_counted_as_collectives() -> None:
    def body(x: jax.Array) -> jax.Array:
        return lax.psum(lax.psum(x, "cp"), ("pp", "tp"))

    (row,) = rows(body, (4,))
    assert row.axes == ("tp",)
    assert count_collectives(local(body, (4,))) == 2


def test_a_permutation_of_each_rank_to_itself_sends_nothing() -> None:
    assert rows(lambda x: lax.ppermute(x, "tp", [(rank, rank) for rank in range(4)]), (4,)) == []


def test_groups_within_an_axis_are_the_ranks_that_exchange() -> None:
    groups = [[0, 1], [2, 3]]
    # JAX has no type for a sum over groups.
    (row,) = rows(lambda x: lax.psum(x, "tp", axis_index_groups=groups), (4,), check_vma=False)
    assert (row.message_bytes, row.sent_bytes) == (16, 16)


def test_a_sum_over_a_vmapped_axis_stays_within_a_rank() -> None:
    def body(x: jax.Array) -> jax.Array:
        return jax.vmap(lambda row: lax.psum(row, "rows"), axis_name="rows")(x)

    # JAX has no type for a sum over a mapped axis.
    assert rows(body, (4, 2), check_vma=False) == []
    assert count_collectives(local(body, (4, 2), check_vma=False)) == 0


def test_a_collective_that_the_ledger_does_not_know_is_refused_by_name() -> None:
    def body(x: jax.Array) -> jax.Array:
        lax.all_gather(x, "tp", to="reduced")
        return x

    with pytest.raises(NotImplementedError, match="cannot count what all_gather_reduced sends"):
        rows(body, (4,))


# Loops and branches


def test_a_scan_multiplies_its_body() -> None:
    def ring(x: jax.Array) -> jax.Array:
        def hop(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return lax.ppermute(x, "tp", [(rank, (rank + 1) % 4) for rank in range(4)]), None

        def layer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return lax.scan(hop, x, None, length=3)[0], None

        return lax.scan(layer, x, None, length=5)[0]

    assert rows(ring, (4,)) == [Traffic("unscoped", "unscoped", "ppermute", ("tp",), 15, 16, 240)]


def test_a_loop_with_an_unknown_trip_count_counts_per_iteration_under_its_own_name() -> None:
    def body(x: jax.Array) -> jax.Array:
        def exchange(x: jax.Array) -> jax.Array:
            with jax.named_scope("moe:all_to_all"):
                return lax.all_to_all(x, "tp", 0, 0, tiled=True)

        def is_left(x: jax.Array) -> jax.Array:
            with jax.named_scope("moe:all_to_all"):
                return lax.pmax(jnp.max(x), ("dp", "tp")) > 0

        with jax.named_scope("loop=rounds"):
            return lax.while_loop(is_left, exchange, x)

    assert rows(body, (4,)) == [
        Traffic("moe", "all_to_all", "all_reduce", ("dp", "tp"), 1, 4, 7, per="rounds"),
        Traffic("moe", "all_to_all", "all_to_all", ("tp",), 1, 16, 12, per="rounds"),
    ]


def test_loops_in_loops_count_per_iteration_of_both() -> None:
    def inner(x: jax.Array) -> jax.Array:
        def exchange(x: jax.Array) -> jax.Array:
            x, _ = lax.scan(lambda x, _: (lax.all_to_all(x, "tp", 0, 0), None), x, None, length=2)
            return x

        return lax.while_loop(lambda x: jnp.max(x) > 0, exchange, x)

    def body(x: jax.Array) -> jax.Array:
        with jax.named_scope("loop=rounds"):
            return lax.while_loop(lambda x: jnp.max(x) > 1, inner, x)

    (row,) = rows(body, (4,))
    assert (row.per, row.calls) == ("rounds*iterations", 2)


def test_of_a_cond_the_branch_that_sends_most_counts() -> None:
    def body(x: jax.Array) -> jax.Array:
        def small(x: jax.Array) -> jax.Array:
            return lax.all_to_all(lax.all_to_all(x, "tp", 0, 0), "tp", 0, 0)  # more calls, fewer bytes

        def large(x: jax.Array) -> jax.Array:
            return lax.ppermute(x, "tp", [(0, 1)]) * 2 + lax.ppermute(x, "tp", [(1, 2)])

        return lax.cond(jnp.sum(x) > 0, small, large, x)

    assert [(row.collective, row.calls, row.sent_bytes) for row in rows(body, (4,))] == [("ppermute", 2, 32)]


@pytest.mark.parametrize("branches", [("cpu", "default"), ("tpu", "cuda", "default"), ("default", "cpu")], ids=str)
def test_of_branches_for_platforms_that_of_accelerators_counts_though_the_cpu_s_sends_more(
    branches: tuple[str, ...],
) -> None:
    def little(x: jax.Array) -> jax.Array:
        return lax.ppermute(x, "tp", [(0, 1)])

    def much(x: jax.Array) -> jax.Array:
        return lax.all_gather(lax.ppermute(x, "tp", [(0, 1)]), "tp").sum(axis=0)

    of_cpu = "cpu" if "cpu" in branches else "default"

    def body(x: jax.Array) -> jax.Array:
        return lax.platform_dependent(x, **{name: much if name == of_cpu else little for name in branches})

    assert [row.collective for row in rows(body, (4,))] == ["ppermute"]


def test_a_branch_for_the_cpu_alone_counts_where_there_is_no_other() -> None:
    (row,) = rows(lambda x: lax.platform_dependent(x, cpu=lambda x: lax.ppermute(x, "tp", [(0, 1)])), (4,))
    assert row.collective == "ppermute"


# Scopes


def test_the_innermost_scope_with_a_strategy_names_a_row() -> None:
    def body(x: jax.Array) -> jax.Array:
        with jax.named_scope("layer_3"), jax.named_scope("moe:gather"), jax.named_scope("shared:psum/sum"):
            return lax.psum(x, "tp")

    (row,) = rows(body, (4,))
    assert (row.sublayer, row.strategy) == ("shared", "psum")


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("jit(step)/shard_map/layer_3/ffn:psum/psum", ("ffn", "psum")),
        ("jit(step)/transpose(jvp(layer_3))/transpose(jvp(ffn:psum))/psum_invariant", ("ffn", "psum")),
        ("jit(step)/attention:ring/while/body/attention:q_replicated/all_gather", ("attention", "q_replicated")),
        ("jit(step)/layer_3/dot_general", ("unscoped", "unscoped")),
        ("", ("unscoped", "unscoped")),
    ],
)
def test_a_path_is_read_in_a_jaxpr_and_in_hlo_alike(path: str, names: tuple[str, str]) -> None:
    assert scope_of(path) == names


@pytest.mark.parametrize(
    "transform",
    [
        jax.jit,
        jax.checkpoint,
        lambda body: lambda x: lax.scan(lambda x, _: (body(x), None), x, None, length=1)[0],
        lambda body: lambda x: lax.cond(jnp.sum(x) > 0, body, body, x),
        lambda body: lambda x: jax.vmap(body)(x[None])[0],
    ],
    ids=["jit", "checkpoint", "scan", "cond", "vmap"],
)
def test_a_scope_reaches_through(transform: Callable[..., Any]) -> None:
    def body(x: jax.Array) -> jax.Array:
        with jax.named_scope("ffn:psum"):
            return transform(lambda x: lax.pcast(lax.psum(x, "tp"), "tp", to="varying"))(x)

    assert rows(body, (4,)) == [Traffic("ffn", "psum", "all_reduce", ("tp",), 1, 16, 24)]


@pytest.mark.parametrize(("transform", "calls"), [(lambda block: block, 2), (jax.checkpoint, 3)], ids=["kept", "again"])
def test_a_derivative_counts_forward_and_transposed_sums_and_those_computed_again(
    transform: Callable[..., Any], calls: int
) -> None:
    def loss(x: jax.Array) -> jax.Array:
        @transform
        def block(x: jax.Array) -> jax.Array:
            with jax.named_scope("ffn:psum"):
                return jnp.sin(lax.pcast(lax.psum(jnp.sin(x), "tp"), "tp", to="varying"))

        return jnp.sum(block(x))

    # Transposed, the cast to varying is a second sum.
    assert rows(jax.grad(loss), (4,)) == [Traffic("ffn", "psum", "all_reduce", ("tp",), calls, 16, calls * 24)]


def test_a_custom_derivative_counts_what_its_own_function_sends() -> None:
    @jax.custom_vjp
    def total(x: jax.Array) -> jax.Array:
        with jax.named_scope("ffn:psum"):
            return lax.psum(x, "tp")

    total.defvjp(lambda x: (total(x), None), lambda _, g: (g,))
    assert rows(total, (4,)) == [Traffic("ffn", "psum", "all_reduce", ("tp",), 1, 16, 24)]


# Ledgers


def test_rows_that_differ_only_in_calls_merge() -> None:
    one = Traffic("ffn", "psum", "all_reduce", ("tp",), 1, 16, 24)
    other = Traffic("ffn", "psum", "all_reduce", ("tp",), 1, 32, 48)
    assert merge([one, other, one]) == [Traffic("ffn", "psum", "all_reduce", ("tp",), 2, 16, 48), other]


def test_ledgers_that_say_the_same_do_not_differ() -> None:
    one = Traffic("ffn", "psum", "all_reduce", ("tp",), 1, 16, 24)
    assert compare([one, one], merge([one, one])) == []


def test_a_difference_names_the_strategy_the_axes_and_both_counts() -> None:
    predicted = [
        Traffic("ffn", "psum", "all_reduce", ("tp",), 2, 16, 48),
        Traffic("moe", "gather", "all_gather", ("dp", "tp"), 1, 16, 112, per="rounds"),
    ]
    traced = [Traffic("ffn", "psum", "all_reduce", ("tp",), 1, 16, 24)]
    assert compare(predicted, traced) == [
        "ffn:psum all_reduce over tp: predicted 2 calls sending 48 bytes, traced 1 call sending 24 bytes",
        "moe:gather all_gather over dp, tp per rounds: predicted 1 call sending 112 bytes, traced none",
    ]
    assert compare([], traced) == [
        "ffn:psum all_reduce over tp: predicted none, traced 1 call sending 24 bytes",
    ]
