"""A residual stream split over tp along its tokens: the same answers, norms and residual sums on slices alone.

On whole meshes and with other options: test_oracles.py, test_context_parallel.py, test_experts.py; what it sends:
test_registry.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from jax.extend.core import JaxprEqn
from oracle_checks import assert_logits, assert_tokens
from oracle_data import load_oracle
from sample_models import oracle_runner
from test_overlap import DENSE, EXPERTS, body
from test_registry import LATENT

from jaxpar.checkpoint.config import ModelConfig
from jaxpar.ledger.predict import predict_traffic
from jaxpar.ledger.walk import array_type, equations, inner_jaxprs
from jaxpar.mesh import MeshSpec
from jaxpar.plan import PHASES, Phase, Plan
from jaxpar.strategies import Step

# Values

FEW: list[tuple[str, str, dict[str, Any]]] = [
    ("qwen2_sliding", "tp=4", {}),
    ("qwen3_moe", "tp=4", {"experts_over": "tp", "moe_dispatch": "all_to_all"}),
    ("qwen3_moe", "dp=2,tp=4", {"experts_over": "dp,tp"}),
    ("gpt_oss", "ep=2,tp=4", {}),
    ("deepseek_v3", "cp=2,tp=4", {"experts_over": "cp,tp"}),
]
# Dense layers with 1, 2 and 3 tokens and experts with 2, the others under `full`.
CASES = [
    pytest.param(*case, tokens, marks=[] if i == 0 or (i, tokens) == (1, 2) else pytest.mark.full)
    for i, case in enumerate(FEW)
    for tokens in (1, 2, 3)
]


@pytest.mark.usefixtures("unwritten_pages_are_nan")
@pytest.mark.parametrize(("name", "mesh", "plan", "tokens"), CASES)
def test_every_rank_has_the_logits_of_transformers_of_fewer_tokens_than_ranks(
    name: str, mesh: str, plan: dict[str, Any], tokens: int
) -> None:
    oracle, runner = load_oracle(name), oracle_runner(name, mesh, chunk=tokens, sequence_parallel=True, **plan)
    longest = max(range(len(oracle.prompts)), key=lambda i: len(oracle.prompts[i]))
    assert_logits(runner, [oracle.prompts[longest][:tokens]], [oracle.logits[longest][:tokens]])


@pytest.mark.usefixtures("unwritten_pages_are_nan")
@pytest.mark.parametrize("requests", [1, *(pytest.param(count, marks=pytest.mark.full) for count in (2, 3))])
def test_every_rank_has_the_tokens_of_transformers_where_fewer_requests_than_ranks_decode(requests: int) -> None:
    oracle, runner = load_oracle("mistral"), oracle_runner("mistral", "tp=4", sequence_parallel=True)
    fewest = sorted(range(len(oracle.prompts)), key=lambda i: len(oracle.prompts[i]))[:requests]
    assert_tokens(runner, [oracle.prompts[i] for i in fewest], [oracle.greedy[i] for i in fewest])


# What a step's program says


def every_equation(eqns: list[JaxprEqn]) -> Iterator[JaxprEqn]:
    """All equations, those of inner jaxprs too."""
    for eqn in eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from every_equation(equations(inner))


def normed_and_added(config: ModelConfig, plan: Plan, phase: Phase, lanes: int) -> tuple[list[int], set[int]]:
    """Of a step: the rows of each norm of the residual stream, and those of all that is added in its width."""
    norms, sums = [], set()
    for eqn in every_equation(body(plan, config, phase, lanes)):
        of = array_type(eqn.outvars[0]) if eqn.outvars else None
        if eqn.primitive.name == "rsqrt" and len(of.shape) == 2:  # one number a token; those of heads have three
            norms.append(of.shape[0])
        if eqn.primitive.name in ("add", "add_any") and of.shape[1:] == (config.hidden_size,):
            sums.add(of.shape[0])
    return norms, sums


@pytest.mark.parametrize(("phase", "ring"), [("prefill", False), ("prefill", True), ("decode", False)])
@pytest.mark.parametrize(("mesh", "lanes"), [("tp=4", 1), ("tp=4", 5), ("dp=2,tp=2", 3), ("cp=2,tp=2", 3)])
def test_norms_and_residual_sums_work_on_slices(mesh: str, lanes: int, phase: Phase, ring: bool) -> None:
    plan = Plan(MeshSpec.parse(mesh), page_size=4, sequence_parallel=True, collective_matmul=ring)
    tokens = lanes if phase == "decode" else 5 * lanes
    norms, sums = normed_and_added(DENSE, plan, phase, lanes)
    assert norms == [-(-tokens // plan.mesh.tp)] * 3  # attention's, the FFN's, the last
    # A ring adds halves of slices.
    assert max(sums) == norms[0]
    whole, _ = normed_and_added(DENSE, Plan(MeshSpec.parse(mesh), page_size=4), phase, lanes)
    assert whole == [tokens] * 3


@pytest.mark.parametrize("dispatch", ["standard", "all_to_all", "ragged"])
@pytest.mark.parametrize("phase", PHASES)
def test_dispatch_starts_from_the_slices_where_tp_splits_experts(phase: Phase, dispatch: str) -> None:
    plan = Plan(
        MeshSpec(dp=2, tp=4), page_size=4, sequence_parallel=True, experts_over=("dp", "tp"), moe_dispatch=dispatch
    )
    step = Step(EXPERTS, plan, phase, lanes=5, tokens=1 if phase == "decode" else 5, keys=16)
    assert step.moe_rows == -(-step.rows // 4)
    # Neither gathered before the experts nor summed after them: tokens go from their slices and come back to them.
    assert not [row for row in predict_traffic(step) if row.sublayer == "moe"]
    assert [row for row in predict_traffic(step) if row.sublayer == "moe_dispatch"]
    norms, _ = normed_and_added(EXPERTS, plan, phase, lanes=5)
    assert norms == [step.moe_rows] * (2 * EXPERTS.num_hidden_layers + 1)


def test_latents_enter_gathered_and_leave_to_slices() -> None:
    plan = Plan(MeshSpec(tp=3), page_size=4, sequence_parallel=True)
    norms, _ = normed_and_added(LATENT, plan, "decode", 5)
    # The latents' own norms work on the tokens that attention works on.
    assert sorted(norms) == [2, 2, 2, 5, 5]
