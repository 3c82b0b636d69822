"""The planner's memory is that of the modules themselves, to the byte, for every way to shard every kind of model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from registry_models import CONFIG, LATENT

from jaxpar.checkpoint.config import ModelConfig, MoEConfig, MoETensors, RouterConfig
from jaxpar.devices import abstract_mesh
from jaxpar.kinds import KINDS
from jaxpar.ledger.memory import memory_of as counted
from jaxpar.mesh import MeshSpec
from jaxpar.plan import Plan
from jaxpar.planner.assumptions import Assumptions
from jaxpar.planner.memory import WEIGHT_ITEMS, memory_of, most_requests
from jaxpar.planner.workload import Workload
from jaxpar.program import Programs

MOE = MoEConfig(
    num_experts=6,
    intermediate_size=10,
    layers=(False, True, True),
    router=RouterConfig(top_k=2, scoring="sigmoid", bias="choice"),
    tensors=MoETensors(
        router="mlp.gate.weight",
        router_bias="mlp.gate.e_score_correction_bias",
        gate="mlp.experts.{expert}.gate_proj.weight",
        up="mlp.experts.{expert}.up_proj.weight",
        down="mlp.experts.{expert}.down_proj.weight",
        shared="mlp.shared_experts.",
    ),
    shared_intermediate_size=14,
    expert_bias=True,
)
MODELS = {
    "dense": CONFIG,
    "untied": replace(CONFIG, tie_word_embeddings=False, mlp_bias=False, o_bias=False, qk_norm=False),
    "latent": replace(LATENT, num_hidden_layers=3, windows=(None,) * 3, tie_word_embeddings=False),
    "experts": replace(CONFIG, moe=MOE, mlp_bias=False, tie_word_embeddings=False),
    "latent experts": replace(LATENT, num_hidden_layers=3, windows=(None,) * 3, moe=MOE),
}
PLANS = {
    "one": Plan(),
    "tp": Plan(MeshSpec(tp=6)),
    "tp over experts": Plan(MeshSpec(dp=2, tp=3), experts_over=("tp",)),
    "wide": Plan(MeshSpec(dp=2, ep=2, tp=2), experts_over=("dp", "ep", "tp")),
    "cp": Plan(MeshSpec(cp=2, tp=2), page_size=4),
    "stages": Plan(MeshSpec(pp=2, tp=2)),
    "half": Plan(MeshSpec(tp=2, ep=2), dtype="bfloat16"),
}
WORKLOAD = Workload(19, 13)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_weights_and_cache_are_those_of_the_modules(model: ModelConfig, plan: Plan) -> None:
    memory = memory_of(model, plan, KINDS["h200"], WORKLOAD, Assumptions(), 11)
    exact = counted(Programs(model, plan, abstract_mesh(plan.mesh)), "prefill", 11, WORKLOAD.longest)
    assert memory.weight_bytes == exact.weight_bytes
    assert memory.cache_bytes == exact.cache_bytes


def test_copies_of_hot_experts_are_counted_as_the_slots_that_hold_them() -> None:
    plan = Plan(MeshSpec(ep=4), expert_slots=8)
    exact = counted(Programs(MODELS["experts"], plan, abstract_mesh(plan.mesh)), "prefill", 4, WORKLOAD.longest)
    memory = memory_of(MODELS["experts"], plan, KINDS["h200"], WORKLOAD, Assumptions(), 4)
    assert memory.weight_bytes == exact.weight_bytes


def test_matrices_have_a_type_of_their_own_and_vocabulary_routers_and_norms_keep_16_bits() -> None:
    plan = Plan(MeshSpec(tp=2), dtype="bfloat16")
    wide, narrow = (
        memory_of(MODELS["experts"], plan, KINDS["h200"], WORKLOAD, Assumptions(weight_dtype=dtype), 1).items
        for dtype in (None, "fp8")
    )
    halved = {name for name in WEIGHT_ITEMS if 2 * narrow[name] == wide[name]}
    assert halved == {"attention weights", "FFN weights", "expert weights"}
    assert all(narrow[name] == wide[name] for name in WEIGHT_ITEMS if name not in halved)


def test_the_most_requests_fit_with_the_reserve_left_free_and_eight_more_a_replica_do_not() -> None:
    device = replace(KINDS["h200"], memory_bytes=4_000_000)
    plan, assumed = Plan(MeshSpec(dp=2, tp=2)), Assumptions(framework_bytes=0)
    most = most_requests(CONFIG, plan, device, WORKLOAD, assumed)
    fullest = memory_of(CONFIG, plan, device, WORKLOAD, assumed, most)
    assert most > 16 and fullest.fits
    assert fullest.total - fullest.items["reserve"] <= 0.9 * device.memory_bytes
    assert not memory_of(CONFIG, plan, device, WORKLOAD, assumed, most + 16).fits


def test_no_request_fits_where_the_weights_do_not() -> None:
    device = replace(KINDS["h200"], memory_bytes=1_000)
    assert most_requests(CONFIG, Plan(), device, WORKLOAD, Assumptions()) == 0


def test_the_largest_item_is_named_and_is_never_the_reserve() -> None:
    memory = memory_of(CONFIG, Plan(), KINDS["h200"], WORKLOAD, Assumptions(reserve=0.9), 1)
    assert memory.largest == "framework"
