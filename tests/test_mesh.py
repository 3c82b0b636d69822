"""The mesh as numbers: specs, coordinates, the rank table."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.errors import MeshError, PlanError
from jaxpar.mesh import AXES, MAX_RANKS, MeshSpec, parse_experts_over, rank_table, sglang_sizes

SPECS = st.builds(MeshSpec, **{axis: st.integers(1, 4) for axis in AXES})


def test_axes_are_ordered_outermost_first_with_tp_innermost():
    assert AXES == ("pp", "dp", "ep", "cp", "tp")
    assert MeshSpec(dp=2, tp=4).rank(dp=0, tp=1) == 1
    assert MeshSpec(dp=2, tp=4).rank(dp=1, tp=0) == 4


def test_a_spec_is_read_in_any_order_and_with_spaces():
    assert MeshSpec.parse(" tp = 4 , dp=2") == MeshSpec(dp=2, tp=4)


@given(SPECS)
def test_the_text_of_a_spec_reads_back_as_the_same_spec(spec: MeshSpec):
    assert MeshSpec.parse(str(spec)) == spec


def test_the_text_of_a_spec_leaves_out_axes_of_size_one():
    assert str(MeshSpec(dp=2, cp=1, tp=4)) == "dp=2,tp=4"
    assert str(MeshSpec()) == "tp=1"


def test_size_counts_every_rank():
    assert MeshSpec(pp=2, dp=3, ep=2, cp=5, tp=4).size == 240
    assert MeshSpec().size == 1


def test_active_axes_come_in_mesh_order_without_those_of_size_one():
    spec = MeshSpec(dp=2, cp=4, tp=2)
    assert spec.active(("tp", "ep", "dp")) == ("dp", "tp")
    assert spec.active(AXES) == ("dp", "cp", "tp")
    assert MeshSpec().active(AXES) == ()


def test_extent_multiplies_the_named_axes_only():
    spec = MeshSpec(dp=2, cp=4, tp=3)
    assert spec.extent(("cp", "tp")) == 12
    assert spec.extent(()) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("  ", "is empty"),
        ("dp", "'dp' is not axis=size"),
        ("dp=2,,tp=4", "'' is not axis=size"),
        ("dp=2,xp=4", "unknown axis in 'xp=4'; the axes are pp, dp, ep, cp, tp"),
        ("DP=2", "unknown axis in 'DP=2'"),
        ("dp=2,tp=4,dp=2", "axis dp is given twice"),
        ("dp=2,tp=0", "the size in 'tp=0' is not a whole number"),
        ("tp=-4", "the size in 'tp=-4' is not a whole number"),
        ("tp=2.5", "the size in 'tp=2.5' is not a whole number"),
        ("tp=1_0", "the size in 'tp=1_0' is not a whole number"),
        ("tp=", "the size in 'tp=' is not a whole number"),
        ("tp=" + "9" * 10_000, "is not a whole number from 1 to 65536"),
        ("dp=65536,tp=2", "more than 65536 ranks"),
    ],
)
def test_a_spec_that_cannot_be_is_refused_by_name_in_one_short_line(text: str, said: str):
    with pytest.raises(MeshError) as refused:
        MeshSpec.parse(text)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 250


def test_sizes_of_numpy_become_ints():
    spec = MeshSpec(dp=np.int64(2), tp=np.uint8(4))
    assert (str(spec), type(spec.dp), type(spec.tp)) == ("dp=2,tp=4", int, int)


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "2", None])
def test_a_size_that_is_not_a_whole_number_from_one_is_refused(size: object):
    with pytest.raises(MeshError, match="mesh axis cp has size"):
        MeshSpec(cp=size)


def test_the_largest_mesh_is_accepted_and_one_rank_more_is_not():
    assert MeshSpec(dp=MAX_RANKS).size == MAX_RANKS
    with pytest.raises(MeshError, match="more than"):
        MeshSpec(dp=MAX_RANKS + 1)


def test_sizes_from_a_mapping_refuse_an_unknown_axis():
    assert MeshSpec.from_sizes({"tp": 4, "dp": 2}) == MeshSpec(dp=2, tp=4)
    for axis in ("sp", 3):
        with pytest.raises(MeshError, match=f"unknown mesh axis {axis!r}"):
            MeshSpec.from_sizes({axis: 2})


@pytest.mark.parametrize("ask", [lambda spec: spec.active(("sp",)), lambda spec: spec.extent(("sp",))])
def test_an_unknown_axis_is_refused_wherever_axes_are_named(ask):
    with pytest.raises(MeshError, match="unknown mesh axis 'sp'"):
        ask(MeshSpec())


@given(SPECS)
def test_rank_and_coordinates_are_inverse_and_every_rank_is_met_once(spec: MeshSpec):
    ranks = [spec.rank(**spec.coordinates(rank)) for rank in range(spec.size)]
    assert ranks == list(range(spec.size))


def test_ranks_and_coordinates_off_the_mesh_are_refused():
    spec = MeshSpec(dp=2, tp=4)
    for rank in (-1, 8):
        with pytest.raises(MeshError, match="its ranks are 0 to 7"):
            spec.coordinates(rank)
    with pytest.raises(MeshError, match="tp has size 4"):
        spec.rank(tp=4)
    with pytest.raises(MeshError, match="cp has size 1"):
        spec.rank(cp=1)


def test_rank_table_of_dp2_cp4_tp2_with_experts_over_all():
    table = rank_table(MeshSpec(dp=2, cp=4, tp=2), parse_experts_over("dp,cp,tp"))
    assert len(table) == 16
    for r, row in enumerate(table):
        assert (row.rank, row.pp, row.dp, row.ep, row.cp, row.tp) == (r, 0, r // 8, 0, (r // 2) % 4, r % 2)
        assert row.expert_rank == r


def test_expert_rank_follows_the_named_axes_in_mesh_order():
    spec = MeshSpec(dp=2, ep=2, tp=2)
    over_ep = [row.expert_rank for row in rank_table(spec)]
    assert over_ep == [0, 0, 1, 1, 0, 0, 1, 1]
    over_dp_and_tp = [row.expert_rank for row in rank_table(spec, parse_experts_over("tp,dp"))]
    assert over_dp_and_tp == [0, 1, 0, 1, 2, 3, 2, 3]


def test_expert_rank_does_not_depend_on_the_pipeline_stage():
    spec = MeshSpec(pp=2, ep=2, tp=2)
    experts = [row.expert_rank for row in rank_table(spec, ("ep", "tp"))]
    assert experts == [0, 1, 2, 3] * 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "unknown axis ''"),
        ("dp,xp", "unknown axis 'xp'; use axes out of dp, ep, cp, tp"),
        ("dp,tp,dp", "axis dp is given twice"),
        ("pp,ep", "a pipeline stage keeps its own experts"),
    ],
)
def test_experts_over_axes_that_cannot_be_are_refused(text: str, said: str):
    with pytest.raises(PlanError, match="experts over") as refused:
        parse_experts_over(text)
    assert said in str(refused.value)


@pytest.mark.parametrize(("axes", "said"), [(3, "over 3: give axes"), (None, "over None"), ([1], "unknown axis '1'")])
def test_experts_over_what_is_no_list_of_axes_are_refused(axes: object, said: str):
    with pytest.raises(PlanError, match=said):
        rank_table(MeshSpec(tp=2), axes)


def test_experts_over_no_axis_is_refused():
    with pytest.raises(PlanError, match="name at least one"):
        rank_table(MeshSpec(tp=2), ())


def test_sglang_counts_every_rank_of_a_stage_as_tp():
    sizes = sglang_sizes(MeshSpec(pp=2, dp=2, cp=4, tp=2), ("dp", "cp", "tp"))
    assert (sizes["attn_dp"], sizes["attn_cp"], sizes["attn_tp"]) == (2, 4, 2)
    assert (sizes["tp_total"], sizes["pp"], sizes["world"]) == (16, 2, 32)
    assert (sizes["ep"], sizes["moe_tp"], sizes["moe_dp"]) == (16, 1, 1)


def test_sglang_splits_an_expert_over_tp_only_where_tp_holds_no_experts():
    sizes = sglang_sizes(MeshSpec(dp=2, ep=4, cp=3, tp=2))
    assert sizes["attn_dp"] == 8, "the ep axis splits requests in attention"
    assert (sizes["ep"], sizes["moe_tp"], sizes["moe_dp"]) == (4, 2, 6)


@given(SPECS, st.sets(st.sampled_from(AXES[1:]), min_size=1))
def test_sglang_sizes_multiply_up_on_both_sides(spec: MeshSpec, experts_over: set[str]):
    sizes = sglang_sizes(spec, experts_over)
    assert sizes["tp_total"] == sizes["attn_dp"] * sizes["attn_cp"] * sizes["attn_tp"]
    assert sizes["moe_tp"] == sizes["tp_total"] // sizes["ep"] // sizes["moe_dp"]
    assert sizes["world"] == sizes["tp_total"] * sizes["pp"] == spec.size
