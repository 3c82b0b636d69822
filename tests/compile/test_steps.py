"""Step programs as the compilers of a TPU and of a GPU make them, held against the plan's closed forms."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache

import pytest

from jaxpar.aot.compile import CompiledStep, compile_step
from jaxpar.aot.every import cut_card
from jaxpar.aot.targets import Target
from jaxpar.ledger.memory import memory_of
from jaxpar.ledger.predict import predict_traffic
from jaxpar.mesh import MeshSpec
from jaxpar.plan import Phase, Plan
from jaxpar.program import Programs

TARGETS = ["v5p:2x2x2", "h200:1x1x8"]
LLAMA = cut_card("llama-3.1-8b", [False])


@cache
def compiled(target: str, mesh: str, phase: Phase) -> CompiledStep:
    """One layer of llama-3.1-8b."""
    return compile_step(LLAMA, Plan(MeshSpec.parse(mesh), dtype="bfloat16"), Target.parse(target), phase, 8, 1024)


@pytest.mark.parametrize("target", TARGETS)
def test_a_decode_step_has_the_memory_flops_and_collectives_of_its_plan(target: str) -> None:
    step = compiled(target, "dp=2,tp=4", "decode")
    held = memory_of(Programs(LLAMA, step.plan, step.target.mesh(step.plan.mesh)), "decode", 8, 1024)
    assert (step.memory.weights, step.memory.cache) == (held.weight_bytes, held.cache_bytes)
    # Arguments are those of the closed form and little more: layouts in whole tiles.
    assert step.fits and 0 <= step.memory.padding < 2**20 and 0 < step.memory.inputs < 2**20
    assert step.memory.temporaries
    assert step.flops_ratio == 1
    assert step.changes == []
    predicted = {(row.sublayer, row.strategy, row.collective, row.axes) for row in predict_traffic(step.step)}
    assert {(row.sublayer, row.strategy, row.collective, row.axes) for row in step.sent} == predicted
    assert sum(row.sent_bytes for row in step.sent) == sum(row.sent_bytes for row in predict_traffic(step.step))


@pytest.mark.parametrize("target", TARGETS)
def test_a_ring_of_prefill_is_asynchronous_and_has_products_beside_it(target: str) -> None:
    step = compiled(target, "cp=4,tp=2", "prefill")
    hops = [row for row in step.sent if row.collective == "ppermute"]
    assert hops
    for hop in hops:
        assert (hop.strategy, hop.axes, hop.asynchronous) == ("ring", ("cp",), True)
        assert hop.overlap is not None and hop.overlap.products > 0


@pytest.mark.parametrize("target", ["v5e:2x4", "h20:1x1x8"])
def test_the_command_prints_its_document_and_nothing_else(target: str) -> None:
    command = [sys.executable, "-m", "jaxpar", "compile", "tiny", "--mesh", "tp=2", "--target", target, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert (document["target"], document["fits"], document["remedy"]) == (target, True, None)
