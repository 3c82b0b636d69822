"""The kernels of accelerators: what a step needs beside weights and cache, and what kernels say they cost."""

from __future__ import annotations

import pytest

from jaxpar.aot.compile import compile_step
from jaxpar.aot.every import cut_card
from jaxpar.aot.targets import Target
from jaxpar.assets import model_dir
from jaxpar.checkpoint import read_config
from jaxpar.mesh import MeshSpec
from jaxpar.plan import Plan

MIB = 1 << 20


@pytest.mark.parametrize("target", ["v5p:2x2x2", "h200:1x1x8"])
def test_decode_copies_neither_the_weights_of_experts_nor_keys_and_values(target: str) -> None:
    # A layer of Qwen3-235B: 576 MiB of experts on each of 8 ranks, 128 MiB of keys and values.
    plan = Plan(MeshSpec(tp=8), dtype="bfloat16", experts_over=("tp",))
    step = compile_step(cut_card("qwen3-235b-a22b", [True]), plan, Target.parse(target), "decode", 64, 4096)
    assert step.memory.weights > 576 * MIB and step.memory.cache >= 128 * MIB
    assert step.memory.temporaries is not None and step.memory.temporaries < 48 * MIB
    assert step.flops_ratio == 1


@pytest.mark.parametrize(
    ("target", "attention"), [("v5p:2x2x2", "helix"), ("h200:1x1x8", "helix"), ("h200:1x1x8", "a2a")]
)
def test_decode_over_cp_copies_no_slice_of_a_weight(target: str, attention: str) -> None:
    # A layer of Llama 3 70B: 168 MiB of the FFN and 16 MiB of the output projection belong to a rank of cp.
    plan = Plan(MeshSpec(cp=2, tp=4), dtype="bfloat16", decode_attention=attention)
    config = read_config(model_dir("llama-3-70b")).of_layers(slice(0, 1))
    step = compile_step(config, plan, Target.parse(target), "decode", 32, 1024)
    assert step.memory.temporaries is not None and step.memory.temporaries < 15 * MIB
    assert step.flops_ratio == 1
