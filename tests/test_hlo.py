from __future__ import annotations

from pathlib import Path

import hlo_program
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxpar.ledger.compiled import Change, compare_compiled
from jaxpar.ledger.hlo import HloCollective, parse_collectives
from jaxpar.ledger.hlo_text import array_bytes
from jaxpar.ledger.replica_groups import axes_of_groups, axes_of_pairs, parse_groups
from jaxpar.ledger.trace import trace_traffic
from jaxpar.ledger.traffic import Traffic

TEXTS = Path(__file__).parent / "hlo"
CPU = ["cpu_jax_0.10.txt", "cpu_jax_0.12.txt"]
ACCELERATORS = ["gpu_h200.txt", "tpu_v5e.txt"]
MESH = hlo_program.SIZES
ROWS, HALF_ROWS = 16 * 128 * 2, 16 * 128 * 4  # bytes of [16, 128] in bfloat16, and promoted


def read(name: str) -> list[HloCollective]:
    return parse_collectives((TEXTS / name).read_text(), MESH)


def traced() -> list[Traffic]:
    mesh = hlo_program.abstract_mesh()
    return trace_traffic(jax.make_jaxpr(hlo_program.program(mesh))(*hlo_program.arguments(mesh)), MESH)


def summary(changes: list[Change]) -> list[tuple[str, str, tuple[str, ...] | None]]:
    return [(change.change, change.collective, change.axes) for change in changes]


# What a compiled program sends


@pytest.mark.parametrize("name", ACCELERATORS)
def test_a_program_on_an_accelerator_is_read_with_its_axes_scopes_and_trip_counts(name: str) -> None:
    rows = {(row.collective, row.axes, row.sublayer, row.strategy, row.calls, row.per) for row in read(name)}
    assert rows == {
        ("all_reduce", ("tp",), "ffn", "psum", 3, ""),
        ("all_reduce", ("tp",), "attention", "psum", 1, ""),
        ("all_gather", ("tp",), "moe", "gather", 1, ""),
        ("reduce_scatter", ("tp",), "moe", "gather", 1, ""),
        ("all_to_all", ("tp",), "moe", "all_to_all", 1, ""),
        ("ppermute", ("tp",), "attention", "ring", 3, ""),
        ("ppermute", ("dp",), "stage", "pipeline", 1, ""),
        ("all_reduce", ("dp",), "unscoped", "unscoped", 1, ""),
        ("all_reduce", ("dp", "tp"), "unscoped", "unscoped", 1, "rounds"),
    }


def test_both_notations_of_groups_say_the_same() -> None:
    listed, named = map(read, CPU)
    assert sorted(map(repr, listed)) == sorted(map(repr, named))


def test_bytes_are_those_of_the_local_operand_and_of_what_is_sent() -> None:
    rows = {(row.collective, row.sublayer): (row.message_bytes, row.sent_bytes) for row in read("gpu_h200.txt")}
    assert rows["all_reduce", "ffn"] == (ROWS, 3 * ROWS * 3 // 2)
    assert rows["all_reduce", "attention"] == (2 * ROWS, 2 * ROWS * 3 // 2)
    assert rows["all_gather", "moe"] == (ROWS, 3 * ROWS)
    assert rows["reduce_scatter", "moe"] == (4 * ROWS, 3 * ROWS)
    assert rows["all_to_all", "moe"] == (4 * ROWS, 3 * ROWS)
    assert rows["ppermute", "attention"] == (4 * ROWS, 3 * 4 * ROWS)


def test_an_exchange_that_starts_and_ends_apart_is_asynchronous() -> None:
    def asynchronous(name: str) -> set[tuple[str, str]]:
        return {(row.collective, row.sublayer) for row in read(name) if row.asynchronous}

    assert ("ppermute", "attention") in asynchronous("gpu_h200.txt") & asynchronous("tpu_v5e.txt")
    assert not any(map(asynchronous, CPU))


def test_a_tpu_reduce_scatter_is_known_inside_its_fusion_with_the_padding_and_the_shift_that_it_adds() -> None:
    # jax.lax.psum_scatter of bf16 [8192, 4096] over eight v5e.
    scatter, shift = parse_collectives((TEXTS / "tpu_v5e_reduce_scatter.txt").read_text(), {"tp": 8})
    assert (scatter.collective, scatter.axes, scatter.message_bytes) == ("reduce_scatter", ("tp",), 8640 * 4096 * 2)
    assert (shift.collective, shift.axes, shift.message_bytes) == ("ppermute", ("tp",), 392 * 4096 * 2)


def test_what_a_compiler_has_written_anew_has_the_scope_of_the_value_that_it_takes() -> None:
    text = """
%all-reduce-scatter (input: f32[16,2]) -> f32[4,2] {
  %input = f32[16,2]{1,0} parameter(0)
  %sum = f32[16,2]{1,0} all-reduce(%input), replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %part = f32[4,2]{1,0} dynamic-slice(%sum, %input), dynamic_slice_sizes={4,2}
}

ENTRY %main (x: f32[16,2]) -> f32[4,2] {
  %x = f32[16,2]{1,0} parameter(0)
  %made = f32[16,2]{1,0} negate(%x), metadata={op_name="jit(f)/layer_0/ffn:psum/dot_general"}
  %moved = f32[16,2]{1,0} copy(%made)
  ROOT %scattered = f32[4,2]{1,0} fusion(%moved), kind=kCustom, calls=%all-reduce-scatter
}
"""
    (row,) = parse_collectives(text, {"tp": 4})
    assert (row.collective, row.sublayer, row.strategy) == ("reduce_scatter", "ffn", "psum")


def test_a_backend_configuration_may_run_over_lines() -> None:
    text = (TEXTS / "cpu_jax_0.12.txt").read_text()
    spread = text.replace('{"known_trip_count":', '{\n"fusions":[\n]},\n{"known_trip_count":')
    assert spread != text
    assert parse_collectives(spread, MESH) == parse_collectives(text, MESH)


ASYNCHRONOUS = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%async_computation (p: f32[64,2]) -> f32[16,2] {
  %p = f32[64,2]{1,0} parameter(0)
  ROOT %scatter = f32[16,2]{1,0} reduce-scatter(%p), replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%add
}

ENTRY %main (x: f32[64,2], y: f32[3]) -> (f32[16,2], f32[12], f32[3]) {
  %x = f32[64,2]{1,0} parameter(0)
  %y = f32[3]{0} parameter(1)
  %start = ((f32[64,2]{1,0}), f32[16,2]{1,0}, u32[]) async-start(%x), calls=%async_computation
  %gather-start = ((f32[3]{0}, f32[64,2]{1,0}), (f32[12]{0}, f32[256,2]{1,0})) all-gather-start(%y, %x), \
replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}
  %gather-done = (f32[12]{0}, f32[256,2]{1,0}) all-gather-done(%gather-start)
  %gathered = f32[12]{0} get-tuple-element(%gather-done), index=0
  %done = f32[16,2]{1,0} async-done(%start)
  %one = f32[3]{0} all-reduce(%y), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%add
  ROOT %result = (f32[16,2]{1,0}, f32[12]{0}, /*index=2*/f32[3]{0}) tuple(%done, %gathered, %one)
}
"""


def test_a_start_over_several_operands_and_a_wrapped_one_are_one_collective_each() -> None:
    scatter, gather, one = parse_collectives(ASYNCHRONOUS, {"dp": 2, "tp": 4})
    assert (scatter.collective, scatter.message_bytes, scatter.asynchronous) == ("reduce_scatter", 512, True)
    assert (gather.collective, gather.message_bytes, gather.asynchronous) == ("all_gather", 12 + 512, True)
    assert (one.axes, one.sent_bytes) == ((), 0)


def test_of_a_conditional_the_branch_that_sends_most_counts() -> None:
    text = """
%quiet (p: f32[4]) -> f32[4] {
  ROOT %p = f32[4]{0} parameter(0)
}

%loud (q: f32[4]) -> f32[4] {
  %q = f32[4]{0} parameter(0)
  ROOT %moved = f32[4]{0} collective-permute(%q), source_target_pairs={{0,1},{1,0}}
}

ENTRY %main (x: f32[4], which: s32[]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %which = s32[] parameter(1)
  ROOT %chosen = f32[4]{0} conditional(%which, %x, %x), branch_computations={%quiet, %loud}
}
"""
    (row,) = parse_collectives(text, {"tp": 2})
    assert (row.collective, row.axes, row.sent_bytes) == ("ppermute", ("tp",), 16)


def test_a_text_that_is_no_program_is_refused() -> None:
    with pytest.raises(ValueError, match="no ENTRY computation"):
        parse_collectives("module @jit_f {}", MESH)


def test_a_mesh_that_is_smaller_than_the_program_is_refused() -> None:
    with pytest.raises(ValueError, match="name device 7, but the mesh has 4 devices"):
        parse_collectives((TEXTS / "cpu_jax_0.10.txt").read_text(), {"tp": 4})


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f32[2,8]{1,0:T(8,128)}", 64),
        ("(bf16[128]{0}, (s8[3], pred[5]), token[])", 256 + 8),
        ("f8e4m3fn[16]", 16),
        ("u4[5]", 3),
        ("c64[]", 8),
        ("f32[<=8]", 32),
    ],
)
def test_the_bytes_of(shape: str, size: int) -> None:
    assert array_bytes(shape) == size


# Groups of devices


@pytest.mark.parametrize(
    ("notation", "groups"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("{}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['dp'=2,'tp'=4] {'tp'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['dp'=2,'tp'=4] {'dp'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['dp'=2,'tp'=4] {'tp','dp'}", ((0, 4, 1, 5, 2, 6, 3, 7),)),
        ("mesh['dp'=2,'tp'=4] {'tp':(1)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['dp'=2,'tp'=4] {'tp':(2)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['a'=1,'b'=2,'c'=4], device_ids=([4,2]T(1,0)) {'b'}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['a'=2,'b'=2], device_ids=([0,2,1,3]) {'b'}", ((0, 2), (1, 3))),
    ],
)
def test_groups_are_read_from(notation: str, groups: tuple[tuple[int, ...], ...]) -> None:
    assert parse_groups(f"channel_id=1, replica_groups={notation}, use_global_device_ids=true", 8) == groups


def test_a_collective_without_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="no device groups in 'channel_id=1'"):
        parse_groups("channel_id=1", 8)


@given(st.data())
def test_groups_along_any_axes_of_any_mesh_are_named_back(data: st.DataObject) -> None:
    sizes = dict(zip(hlo_program.AXES, data.draw(st.lists(st.integers(1, 3), min_size=5, max_size=5)), strict=True))
    axes = data.draw(st.sets(st.sampled_from(hlo_program.AXES)))
    mesh = ",".join(f"'{axis}'={size}" for axis, size in sizes.items())
    spanned = ",".join(f"'{axis}'" for axis in sorted(axes))
    groups = parse_groups(f"replica_groups=mesh[{mesh}] {{{spanned}}}", 0)
    assert axes_of_groups(groups, sizes) == tuple(axis for axis in sizes if axis in axes and sizes[axis] > 1)


@pytest.mark.parametrize(
    "groups",
    [((0, 1, 4, 5), (2, 3, 6, 7)), ((0, 5), (1, 4), (2, 7), (3, 6)), ((0, 1, 2), (3,), (4, 5, 6), (7,))],
    ids=["a part of two axes", "a diagonal", "groups of unequal size"],
)
def test_groups_that_are_no_axes_have_no_name(groups: tuple[tuple[int, ...], ...]) -> None:
    assert axes_of_groups(groups, {"dp": 2, "tp": 4}) is None


def test_equal_parts_of_one_axis_are_named_by_it() -> None:
    for groups in ((0, 1), (2, 3), (4, 5), (6, 7)), ((0, 2), (1, 3), (4, 6), (5, 7)):
        assert axes_of_groups(groups, {"dp": 2, "tp": 4}) == ("tp",)


def test_pairs_are_named_by_the_axes_along_which_they_move() -> None:
    sizes = {"dp": 2, "tp": 4}
    assert axes_of_pairs(((0, 1), (1, 2), (2, 3), (3, 0)), sizes) == ("tp",)
    assert axes_of_pairs(((0, 4),), sizes) == ("dp",)
    assert axes_of_pairs(((3, 4), (7, 0)), sizes) == ("dp", "tp")
    assert axes_of_pairs(((2, 2),), sizes) == ()


# What XLA made of the traced program


def test_accelerators_merge_two_all_reduces_and_keep_the_bytes() -> None:
    (merged,) = compare_compiled(traced(), read("gpu_h200.txt"))
    assert merged == Change("merged", "all_reduce", ("tp",), "", 5, 5 * ROWS, 4, 5 * ROWS)
    assert str(merged) == (
        "merged: all_reduce over tp: traced 5 calls, 20480 bytes in all, compiled 4 calls, 20480 bytes in all"
    )


def test_a_sum_that_a_tpu_takes_in_another_type_is_resized() -> None:
    changes = compare_compiled(traced(), read("tpu_v5e.txt"))
    assert summary(changes) == [("merged", "all_reduce", ("tp",)), ("resized", "all_reduce", ("dp",))]


@pytest.mark.parametrize("name", CPU)
def test_cpus_promote_16_bit_operands_which_adds_nothing(name: str) -> None:
    changes = compare_compiled(traced(), read(name))
    assert changes[:2] == [
        Change("promoted", "all_reduce", ("tp",), "", 5, 5 * ROWS, 4, 5 * HALF_ROWS),
        Change("merged", "all_reduce", ("tp",), "", 5, 5 * ROWS, 4, 5 * HALF_ROWS),
    ]
    assert {change.change for change in changes[2:]} == {"promoted"}
    # The sum over dp is of a float32 that the program itself converts.
    assert ("promoted", "all_reduce", ("dp",)) not in summary(changes)


def test_what_this_jax_compiles_reads_like_its_committed_text() -> None:
    compiled = parse_collectives(hlo_program.compiled_text(hlo_program.device_mesh()), MESH)
    assert compare_compiled(traced(), compiled) == compare_compiled(traced(), read(CPU[-1]))


def test_an_automatic_program_is_all_added() -> None:
    mesh = hlo_program.device_mesh()
    rows, columns = (jax.NamedSharding(mesh, spec) for spec in (P("tp"), P(None, "tp")))
    product = jax.jit(jnp.matmul, out_shardings=jax.NamedSharding(mesh, P()))
    x = jax.ShapeDtypeStruct((8, 64), jnp.float32, sharding=columns)
    weight = jax.ShapeDtypeStruct((64, 16), jnp.float32, sharding=rows)
    compiled = parse_collectives(product.lower(x, weight).compile().as_text(), MESH)
    assert compare_compiled([], compiled) == [Change("added", "all_reduce", ("tp",), "", 0, 0, 1, 8 * 16 * 4)]


def test_collectives_over_one_rank_are_no_change() -> None:
    def body(x: jax.Array) -> jax.Array:
        return lax.psum(x, "cp")

    mesh = hlo_program.device_mesh()
    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P(("cp", "tp")), out_specs=P("tp")))
    compiled = parse_collectives(program.lower(jnp.ones(8)).compile().as_text(), MESH)
    assert [row.axes for row in compiled] == [()]  # XLA:CPU keeps it
    assert compare_compiled([], compiled) == []


def row(calls: int, message: int, *, promoted: bool = False) -> HloCollective:
    groups = ((0, 1, 2, 3), (4, 5, 6, 7))
    return HloCollective("all_reduce", ("tp",), groups, message, calls, "", "ffn", "psum", promoted)


@pytest.mark.parametrize(
    ("compiled", "changes"),
    [
        ([row(2, 16)], []),
        ([row(1, 32)], ["merged"]),
        ([row(4, 8)], ["split"]),
        ([row(1, 16)], ["removed"]),
        ([], ["removed"]),
        ([row(3, 16)], ["added"]),
        ([row(2, 24)], ["resized"]),
        ([row(2, 32, promoted=True)], ["promoted"]),
        ([row(2, 32)], ["resized"]),
        ([row(2, 16, promoted=True)], []),
        ([row(1, 32, promoted=True)], ["merged"]),
        ([row(1, 64, promoted=True)], ["promoted", "merged"]),
        ([row(1, 32, promoted=True), row(1, 16)], ["promoted"]),
        ([row(3, 32, promoted=True)], ["promoted", "added"]),
    ],
)
def test_two_traced_sums_of_16_bytes_become(compiled: list[HloCollective], changes: list[str]) -> None:
    before = [Traffic("ffn", "psum", "all_reduce", ("tp",), 2, 16, 48)]
    assert [change.change for change in compare_compiled(before, compiled)] == changes
