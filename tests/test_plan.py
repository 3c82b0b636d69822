"""The plan says which axes carry what; it names nothing of size 1, and refuses what cannot run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.errors import PlanError
from jaxpar.mesh import AXES, MeshSpec
from jaxpar.plan import PHASES, Plan, Sublayer, SublayerName
from jaxpar.runner import make_plan

SPECS = st.builds(MeshSpec, **{axis: st.integers(1, 3) for axis in AXES})
SUBLAYERS: tuple[SublayerName, ...] = ("attention", "ffn", "vocabulary")
FULL = Plan(MeshSpec(pp=2, dp=2, ep=2, cp=2, tp=2))


def test_requests_are_split_over_dp_and_ep() -> None:
    assert FULL.requests == ("dp", "ep")


def test_tokens_are_split_over_cp_in_prefill_and_copied_over_it_in_decode() -> None:
    assert FULL.tokens("prefill") == ("dp", "ep", "cp")
    assert FULL.tokens("decode") == ("dp", "ep")


def test_width_is_split_over_tp_layers_over_pp_and_pages_over_replicas_and_cp() -> None:
    assert FULL.width == ("tp",)
    assert FULL.pipeline == ("pp",)
    assert FULL.pages == ("dp", "ep", "cp")


def test_the_residual_stream_lies_where_its_tokens_do() -> None:
    assert FULL.residual == {"prefill": ("dp", "ep", "cp"), "decode": ("dp", "ep")}


def test_a_sublayer_enters_with_what_it_has_and_leaves_by_one_sum_over_tp() -> None:
    for phase in PHASES:
        for name in SUBLAYERS:
            assert Plan(MeshSpec(dp=2, tp=4)).sublayer(name, phase) == Sublayer(gather=(), scatter=(), sum=("tp",))
            assert Plan(MeshSpec(dp=8)).sublayer(name, phase) == Sublayer(gather=(), scatter=(), sum=())


def test_a_residual_stream_split_over_tp_turns_the_sum_into_a_gather_and_a_reduce_scatter() -> None:
    plan = Plan(MeshSpec(dp=2, tp=4), sequence_parallel=True)
    for phase in PHASES:
        assert plan.residual[phase] == ("dp", "tp")
        for name in SUBLAYERS:
            assert plan.sublayer(name, phase) == Sublayer(gather=("tp",), scatter=("tp",), sum=())


def test_products_take_the_place_of_the_gather_and_the_reduce_scatter_of_a_prefill() -> None:
    plan = Plan(MeshSpec(cp=2, tp=4), sequence_parallel=True, collective_matmul=True)
    ring = Sublayer(gather=(), scatter=(), sum=(), ring_in=("tp",), ring_out=("tp",))
    assert plan.sublayer("attention", "prefill") == plan.sublayer("ffn", "prefill") == ring
    without = replace(plan, collective_matmul=False)
    assert plan.sublayer("vocabulary", "prefill") == without.sublayer("vocabulary", "prefill")
    assert all(plan.sublayer(name, "decode") == without.sublayer(name, "decode") for name in SUBLAYERS)


def test_heads_lie_over_cp_and_tp_after_decode_attention_and_under_helix_so_does_the_ffn() -> None:
    plan = Plan(MeshSpec(dp=2, cp=2, tp=2))
    widths = {name: plan.width_of(name, "decode") for name in SUBLAYERS}
    assert widths == {"attention": ("cp", "tp"), "ffn": ("tp",), "vocabulary": ("tp",)}
    assert replace(plan, decode_attention="helix").width_of("ffn", "decode") == ("cp", "tp")
    for name in SUBLAYERS:
        assert replace(plan, decode_attention="helix").width_of(name, "prefill") == ("tp",)
    split = replace(plan, sequence_parallel=True).sublayer("attention", "decode")
    assert split == Sublayer(gather=("tp",), scatter=("tp",), sum=("cp",))


def test_under_helix_experts_keep_their_width_and_take_a_share_of_the_tokens_or_lie_over_cp_themselves() -> None:
    plan = Plan(MeshSpec(cp=2, tp=4), decode_attention="helix")
    over_both = replace(plan, experts_over=("cp", "tp"))
    assert [one.width_of("moe", "decode") for one in (plan, over_both)] == [("tp",), ()]
    assert [one.sublayer("moe", "decode").deal for one in (plan, over_both)] == [("cp",), ("cp", "tp")]


@given(SPECS, st.booleans())
def test_no_part_of_a_plan_names_an_axis_of_size_1(spec: MeshSpec, sequence_parallel: bool) -> None:
    plan = Plan(spec, sequence_parallel=sequence_parallel)
    named = {*plan.requests, *plan.width, *plan.pipeline, *plan.pages, *plan.sequence}
    for phase in PHASES:
        named |= {*plan.tokens(phase), *plan.residual[phase], *plan.slices(phase)}
        for name in SUBLAYERS:
            sublayer = plan.sublayer(name, phase)
            named |= {*sublayer.gather, *sublayer.scatter, *sublayer.sum}
    assert all(spec.sizes[axis] > 1 for axis in named)


@given(SPECS, st.booleans(), st.sampled_from(["auto", "helix"]))
def test_partial_sums_leave_a_sublayer_over_its_width_and_nothing_else(
    spec: MeshSpec, sequence_parallel: bool, decode: str
) -> None:
    plan = Plan(spec, sequence_parallel=sequence_parallel, decode_attention=decode)
    for phase in PHASES:
        for name in SUBLAYERS:
            sublayer = plan.sublayer(name, phase)
            assert {*sublayer.sum, *sublayer.scatter} == set(plan.width_of(name, phase))
            assert not {*sublayer.sum} & {*sublayer.scatter}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"chunk": 0}, "chunk=0: it must be a whole number of at least 1"),
        ({"chunk": 1.5}, "chunk=1.5: it must be a whole number of at least 1"),
        ({"page_size": -4}, "page_size=-4: it must be a whole number of at least 1"),
        ({"max_num_seqs": True}, "max_num_seqs=True: it must be a whole number of at least 1"),
        ({"dtype": "int8"}, "dtype='int8' is unknown: use one of float32, bfloat16, float16"),
        ({"dtype": np.dtype("float32")}, "dtype=dtype('float32') is unknown: use one of float32, bfloat16, float16"),
        ({"chunk": None}, "chunk=None: it must be a whole number of at least 1"),
        ({"all_reduce": []}, "all_reduce=[]: give a strategy's name, such as 'psum'"),
        ({"prefill_attention": 3}, "prefill_attention=3: give a strategy's name, such as 'auto'"),
        ({"layout": "ring"}, "layout='ring' is not a layout: use one of contiguous, zigzag, striped"),
        ({"ulysses_degree": -1}, "ulysses_degree=-1: it must be a whole number of at least 0"),
        ({"ulysses_degree": 2}, "ulysses_degree=2 is for prefill_attention='usp': choose it, or leave this"),
        ({"cp_interleave": 600, "mesh": MeshSpec(cp=2)}, "cp_interleave=600 on cp=2 leaves ranks without tokens"),
        ({"decode_overlap": 0}, "decode_overlap=0: it must be a whole number of at least 1"),
        ({"single_batch_overlap": 0}, "single_batch_overlap=0: it must be a whole number of at least 1"),
        ({"two_batch_overlap": 2}, "two_batch_overlap=2: it must be True or False"),
        ({"moe_dispatch": 3}, "moe_dispatch=3: give a strategy's name, such as 'auto'"),
        ({"moe_deduplicate": 1}, "moe_deduplicate=1: it must be True or False"),
        ({"moe_capacity": -0.5}, "moe_capacity=-0.5: it must be 0 (nothing is dropped) or above"),
        ({"moe_capacity": float("nan")}, "moe_capacity=nan: it must be 0 (nothing is dropped) or above"),
        ({"moe_capacity": 10**400}, "moe_capacity=10000"),
        ({"moe_capacity": "1"}, "moe_capacity='1': it must be 0 (nothing is dropped) or above"),
        ({"devices_per_node": -1}, "devices_per_node=-1: it must be a whole number of at least 0"),
        ({"sequence_parallel": "no"}, "sequence_parallel='no': it must be True or False"),
        ({"sequence_parallel": True, "collective_matmul": 1}, "collective_matmul=1: it must be True or False"),
        (
            {"collective_matmul": True},
            "collective_matmul=True overlaps what sequence parallelism sends, and sequence_parallel=False sends none "
            "of it: give sequence_parallel, or leave this",
        ),
        ({"experts_over": ("pp",)}, "experts over 'pp': a pipeline stage keeps its own experts; use axes out of dp"),
        ({"experts_over": "ep,ep"}, "experts over 'ep,ep': axis ep is given twice"),
        ({"experts_over": None}, 'experts over None: give axes out of dp, ep, cp, tp, such as "dp,tp"'),
        ({"expert_slots": 8, "mesh": MeshSpec(pp=2)}, "expert_slots=8 on pp=2: copies of experts are placed where all"),
        ({"pages": 4}, "a plan has no field 'pages': use stages, experts_over, "),
    ],
)
def test_a_value_that_no_plan_can_have_is_refused_with_the_remedy(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError) as raised:
        make_plan(fields.get("mesh", MeshSpec()), {name: fields[name] for name in fields if name != "mesh"})
    assert str(raised.value).startswith(said)


@pytest.mark.parametrize("mesh", [None, "dp=2,tp=4", {"tp": 2}])
def test_a_plan_s_mesh_is_a_mesh_spec(mesh: Any) -> None:
    with pytest.raises(PlanError, match=r"^mesh=.*: give a MeshSpec, such as MeshSpec\(dp=2, tp=4\)$"):
        Plan(mesh)


def test_whole_numbers_of_numpy_become_ints() -> None:
    plan = Plan(chunk=np.int64(9), page_size=np.uint8(3), max_num_seqs=np.int32(5), moe_capacity=np.float32(1.5))
    assert plan == Plan(chunk=9, page_size=3, max_num_seqs=5, moe_capacity=1.5)
    assert {type(size) for size in (plan.chunk, plan.page_size, plan.max_num_seqs)} == {int}


@pytest.mark.parametrize("axes", ["tp,dp", " dp , tp ", ["tp", "dp"], ("dp", "tp")])
def test_experts_are_over_the_same_axes_however_they_are_given(axes: Any) -> None:
    assert Plan(experts_over=axes).experts_over == ("dp", "tp")
