"""What transformers computes for mixtures of experts comes out under every dispatch, on every rank."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from oracle_checks import assert_logits, assert_tokens, checked_loads
from oracle_data import EXPERT_ORACLES, load_oracle
from sample_models import open_session, oracle_runner

from jaxpar.registry import STRATEGIES
from jaxpar.runner import Runner

pytestmark = pytest.mark.usefixtures("unwritten_pages_are_nan")
DISPATCHES = [s.name for s in STRATEGIES if s.sublayer == "moe_dispatch" and s.axes]
# Experts over ep alone, with their width over tp, over axes with copies of tokens, and over all: 6, 8 and 12 experts,
# in order or with copies.
PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "ep=2": ("ep=2", {}),
    "ep=4": ("ep=4", {}),
    "ep=8, moving": ("ep=8", {"expert_slots": 16, "rebalance_every": 2}),
    "width over tp": ("dp=2,ep=2,tp=2", {"expert_slots": 14}),
    "over ep and cp": ("ep=2,cp=2,tp=2", {"experts_over": "ep,cp", "expert_slots": 16}),
    "over all": ("dp=2,ep=2,tp=2", {"experts_over": "dp,ep,tp", "expert_slots": 16}),
    "over dp, cp and a split residual": ("dp=2,cp=2,tp=2", {"experts_over": "dp,cp,tp", "sequence_parallel": True}),
    "helix": ("ep=2,cp=2", {"decode_attention": "helix"}),
}
PRODUCT = list(itertools.product(EXPERT_ORACLES, PLANS, DISPATCHES))
# Options that no plan above has.
MORE: list[tuple[str, str, dict[str, Any]]] = [
    ("mixtral", "tp=1", {"expert_slots": 9}),
    ("gpt_oss", "dp=2,ep=2,tp=2", {"expert_slots": 8, "moe_dispatch": "ragged", "moe_deduplicate": True}),
    (
        "deepseek_v2",
        "ep=8",
        {"expert_slots": 16, "moe_dispatch": "all_to_all", "moe_deduplicate": True, "rebalance_every": 3},
    ),
    ("deepseek_v3", "dp=2,cp=2,tp=2", {"expert_slots": 24, "experts_over": "dp,cp,tp", "moe_dispatch": "ragged"}),
    ("gpt_oss", "ep=2,cp=2", {"expert_slots": 10, "decode_attention": "helix", "rebalance_every": 1}),
]
# Each plan once: six oracles and four dispatches take turns with eight plans.
CHOICE = [
    (EXPERT_ORACLES[i % len(EXPERT_ORACLES)], plan, DISPATCHES[(i + i // 4) % len(DISPATCHES)])
    for i, plan in enumerate(PLANS)
]


def assert_is_the_oracle(name: str, mesh: str, **plan: Any) -> None:
    oracle, runner = load_oracle(name), oracle_runner(name, mesh, page_size=5, **plan)
    assert oracle.margin > 0.01
    assert_logits(runner, oracle.prompts, oracle.logits)
    assert_tokens(runner, oracle.prompts, oracle.greedy)
    checked_loads(runner, oracle.prompts, oracle.greedy)
    if runner.plan.rebalance_every:
        assert runner.balancer is not None and runner.balancer.moved


def assert_dispatched(name: str, plan: str, dispatch: str) -> None:
    mesh, fields = PLANS[plan]
    # An axis alone is all across nodes; of several the innermost lies inside them.
    nodes = {"devices_per_node": 2 if "," in mesh else 1} if dispatch == "two_level" else {}
    assert_is_the_oracle(name, mesh, moe_dispatch=dispatch, **fields, **nodes)


# The others' experts lie in files as those of these three do.
@pytest.mark.parametrize(
    "name", ["mixtral", *(pytest.param(name, marks=pytest.mark.full) for name in ("deepseek_v3", "gpt_oss"))]
)
def test_one_device_has_the_logits_and_tokens_of_transformers(name: str) -> None:
    assert_is_the_oracle(name, "tp=1")


@pytest.mark.parametrize(("name", "plan", "dispatch"), CHOICE)
def test_every_rank_has_the_logits_and_tokens_of_transformers(name: str, plan: str, dispatch: str) -> None:
    assert_dispatched(name, plan, dispatch)


def prefill_loads(runner: Runner, prompts: list[list[int]]) -> np.ndarray:
    """The choices that each expert got of the prompts' tokens, over all ranks [layers, experts]."""
    chunks = open_session(runner, prompts, 1).prefill()
    return np.sum([np.asarray(chunk.output.loads).sum(axis=0) for chunk in chunks], axis=0)


@pytest.mark.parametrize("plan", ["width over tp", "over all", "over dp, cp and a split residual"])
def test_the_loads_of_experts_count_each_choice_of_each_token_once(plan: str) -> None:
    prompts, (mesh, fields) = load_oracle("qwen3_moe").prompts, PLANS[plan]
    found = prefill_loads(oracle_runner("qwen3_moe", mesh, page_size=5, **fields), prompts)
    one_device = oracle_runner("qwen3_moe", "tp=1", page_size=5)
    np.testing.assert_array_equal(found, prefill_loads(one_device, prompts))
    moe = one_device.config.moe
    assert moe is not None
    assert (found.sum(axis=1) == sum(map(len, prompts)) * moe.router.top_k).all()


@pytest.mark.full
@pytest.mark.parametrize(("name", "plan", "dispatch"), sorted(set(PRODUCT) - set(CHOICE)))
def test_every_rank_has_the_logits_and_tokens_of_transformers_in_all_other_ways(
    name: str, plan: str, dispatch: str
) -> None:
    assert_dispatched(name, plan, dispatch)


@pytest.mark.full
@pytest.mark.parametrize(("name", "mesh", "fields"), MORE)
def test_every_rank_has_the_logits_and_tokens_of_transformers_with_copies_of_experts_and_other_options(
    name: str, mesh: str, fields: dict[str, Any]
) -> None:
    assert_is_the_oracle(name, mesh, **fields)
