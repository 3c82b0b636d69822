"""Rings are asynchronous on accelerators: every hop starts before work that does not need it, and ends after it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jaxpar.aot.targets import Target
from jaxpar.assets import model_dir
from jaxpar.checkpoint import read_config
from jaxpar.ledger.hlo import HloCollective, parse_collectives
from jaxpar.mesh import MeshSpec
from jaxpar.plan import Plan
from jaxpar.program import Programs
from jaxpar.strategies import Step

TARGETS = ("v5p:2x2x1", "h200:1x1x4")


def hops(target: str, mesh: str, strategy: str, tokens: int, **fields: Any) -> list[HloCollective]:
    """The ppermutes of a strategy in a prefill step of a model of one layer with heads of 128."""
    config = replace(
        read_config(model_dir("tiny")), num_hidden_layers=1, windows=(None,), hidden_size=512, head_dim=128
    )
    plan = Plan(MeshSpec.parse(mesh), dtype="bfloat16", **fields)
    step = Step(config, plan, "prefill", 1, tokens, tokens)
    programs = Programs(config, plan, Target.parse(target).mesh(plan.mesh))
    arguments = programs.abstract_arguments(step, tokens // plan.page_size)
    text = programs.step("prefill").lower(*arguments).compile().as_text()
    rows = parse_collectives(text, plan.mesh.sizes)
    return [row for row in rows if (row.collective, row.strategy) == ("ppermute", strategy)]


@pytest.mark.parametrize("target", TARGETS)
def test_every_hop_of_ring_attention_is_under_way_during_products(target: str) -> None:
    found = hops(target, "cp=4", "ring", 256, prefill_attention="ring")
    keys = 256 * 4 * 128 * 2  # tokens of a rank, KV heads, their size, bytes
    assert sum(row.sent_bytes for row in found) == 3 * 2 * keys, "keys and values, to three ranks"
    assert all(row.overlap and row.overlap.products for row in found), found


@pytest.mark.parametrize("target", TARGETS)
def test_every_hop_of_a_collective_matmul_is_under_way_during_products(target: str) -> None:
    fields = {"sequence_parallel": True, "collective_matmul": True}
    found = hops(target, "tp=4", "collective_matmul", 1024, **fields)
    assert found, "there are rings"
    assert all(row.overlap and row.overlap.products for row in found), found
