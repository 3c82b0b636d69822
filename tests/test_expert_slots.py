"""Slots with copies of experts: what is refused, and what the ledger counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from oracle_data import ROOT

import jaxpar
from jaxpar import MeshSpec, Plan, PlanError
from jaxpar.checkpoint import open_checkpoint
from jaxpar.ledger.report import make_ledger
from jaxpar.ledger.rounds import count_rounds
from jaxpar.ledger.steps import make_steps

# What is refused

REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("qwen3_moe", "ep=4", {"expert_slots": 10}, "expert_slots=10 on 4 ranks: each has as many; use a multiple of 4, s"),
    ("qwen3_moe", "ep=4", {"expert_slots": 4}, "expert_slots=4 for 8 experts: use 8 or more, or 0 for no copies"),
    ("qwen3_moe", "ep=4", {"expert_slots": 8192}, "expert_slots=8192: experts are placed in 4096 at most; use 4096 or"),
    ("llama_9_3", "tp=2", {"expert_slots": 4}, "expert_slots=4: this llama has no experts; leave it out"),
    ("qwen3_moe", "ep=4", {"rebalance_every": 5}, "rebalance_every=5 moves experts between slots, and expert_slots=0"),
]


@pytest.mark.parametrize(("name", "mesh", "fields", "said"), REFUSED)
def test_slots_that_cannot_be_are_refused(name: str, mesh: str, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError) as error:
        jaxpar.load(ROOT / name, mesh, **fields)
    assert str(error.value).startswith(said)


def test_experts_in_order_are_not_moved() -> None:
    with pytest.raises(PlanError, match="expert_slots=0 leaves experts in order: load the model with slots for copies"):
        jaxpar.load(ROOT / "qwen3_moe", "ep=4").rebalance()


# The ledger


def test_the_ledger_counts_the_slots_there_are_and_rounds_of_the_placement_that_loads_ask_for() -> None:
    config = open_checkpoint(ROOT / "qwen3_moe").config
    spec = MeshSpec(ep=4)
    plain = Plan(spec, moe_dispatch="all_to_all")
    copies = Plan(spec, moe_dispatch="all_to_all", expert_slots=16)
    more = (
        make_ledger(config, copies, "decode", 8, 16).weight_bytes
        - make_ledger(config, plain, "decode", 8, 16).weight_bytes
    )
    # Two more of each rank in each of two layers, three matrices of 36 x 40 in float32.
    assert more == 2 * 2 * 3 * 36 * 40 * 4
    loads = np.tile([90.0, 1, 1, 1, 1, 1, 1, 1], (2, 1))
    rounds = [count_rounds(make_steps(config, plan, "prefill", 64, 64)[0], loads)["rounds"] for plan in (plain, copies)]
    assert rounds == [[3, 3], [1, 1]]
