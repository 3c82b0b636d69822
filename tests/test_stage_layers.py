"""Layers of several stages in one slot: what they compute is what transformers does, whichever stage has which."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle_data import ROOT, load_oracle
from stage_program import StageProgram
from uniform import uniform_control_violations

from jaxpar.attention.partial import NO_WINDOW
from jaxpar.attention.tiles import attend
from jaxpar.ledger.trace import trace_traffic
from jaxpar.ledger.traffic import merge
from jaxpar.pipeline.stages import loads_by_layer
from jaxpar.registry import chosen


def stage_program(name: str, mesh: str, **plan: Any) -> StageProgram:
    prompts = load_oracle(name).prompts
    return StageProgram(ROOT / name, mesh, len(prompts), max(map(len, prompts)), **plan)


CASES = {
    "3 layers on 2 stages, a tied vocabulary": ("qwen3", "pp=2", {}),
    "windows that differ, a tied vocabulary on the first and the last of 4": ("qwen2_sliding", "pp=4", {}),
    "windows that differ, sinks, and an absent layer": ("gpt_oss", "pp=2", {"stages": "1,2"}),
    "a dense layer whose slot has no experts": ("deepseek_v3", "pp=2", {}),
    "a dense layer and layers with experts in one slot, and tokens that go to other ranks": (
        "deepseek_v3",
        "pp=2,ep=2",
        {"stages": "1,2", "moe_dispatch": "all_to_all"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_stage_after_stage_gives_the_logits_of_transformers_and_counts_every_choice(case: str) -> None:
    name, mesh, plan = CASES[case]
    oracle, program = load_oracle(name), stage_program(name, mesh, **plan)
    logits, loads = program.run(oracle.prompts)
    for found, expected in zip(logits, oracle.logits, strict=True):
        np.testing.assert_allclose(found[:, : expected.shape[1]], expected, rtol=0, atol=1e-4)
    moe = program.config.moe
    if moe is not None:
        assert loads is not None
        by_layer = loads_by_layer(loads, program.config, program.plan).sum(axis=0)
        # Nothing is counted where a stage has no experts or no tokens.
        assert by_layer.sum() == loads.sum()
        choices = sum(map(len, oracle.prompts)) * moe.router.top_k
        assert by_layer.sum(axis=1).tolist() == [choices] * sum(moe.layers)


def test_stages_run_as_many_rounds_as_the_fullest_pair_of_any_stage_and_the_closed_form_says_so() -> None:
    program = stage_program("deepseek_v3", "pp=2,ep=2", stages="1,2", moe_dispatch="all_to_all")
    sizes = program.plan.mesh.sizes
    assert uniform_control_violations(program.jaxpr, sizes) == []
    traced = [row for row in trace_traffic(program.jaxpr, sizes) if row.sublayer == "moe_dispatch"]
    dispatch = chosen(program.step)["moe_dispatch"]
    # One dispatch for each tick.
    assert merge(traced) == merge(row for _ in range(2) for row in dispatch.traffic(program.step))
    assert any(row.axes == ("pp", "ep") for row in traced)


def test_a_stage_holds_its_layers_and_its_part_of_the_vocabulary_and_nothing_else() -> None:
    program = stage_program("gpt_oss", "pp=3")
    alone = stage_program("gpt_oss", "tp=1")
    config = program.config
    of_ranks = [
        sum(
            shard.data.nbytes
            for array in program.arrays.values()
            for shard in array.addressable_shards
            if shard.device == device
        )
        for device in program.mesh.devices.flat
    ]
    layers = sum(array.nbytes for name, array in alone.arrays.items() if name.startswith("slots."))
    outside = 4 * (config.vocab_size * config.hidden_size + config.hidden_size)
    assert of_ranks == [layers // 3 + outside] * 3
    vocabulary = np.asarray(program.arrays["vocabulary"])
    np.testing.assert_array_equal(vocabulary[0], alone.arrays["embedding"])
    np.testing.assert_array_equal(vocabulary[2], alone.arrays["head"])
    assert not vocabulary[1].any()


# Windows that are data


@pytest.mark.parametrize(("queries", "window"), [(1, 5), (7, 5), (300, 5), (300, 150), (300, None)])
def test_attention_with_a_window_that_is_data_is_that_with_the_number(queries: int, window: int | None) -> None:
    rng, keys = np.random.default_rng(0), 1100
    q, k, v = (
        rng.standard_normal(s).astype(np.float32) for s in ((1, 2, queries, 2, 4), (1, 2, keys, 4), (1, 2, keys, 4))
    )
    q_positions = np.stack([np.arange(keys - queries, keys), np.full(queries, -1)]).astype(np.int32)
    k_positions = np.tile(rng.permutation(keys).astype(np.int32) - 3, (2, 1))
    arrays = q, k, v, q_positions, np.maximum(k_positions, -1)

    as_data = jax.jit(lambda window: attend(*map(jnp.asarray, arrays), window, 0.5))(
        NO_WINDOW if window is None else window
    )
    expected = jax.jit(lambda: attend(*map(jnp.asarray, arrays), window, 0.5))()
    np.testing.assert_array_equal(as_data.lse, expected.lse)
    np.testing.assert_allclose(as_data.out[:, 0], expected.out[:, 0], rtol=0, atol=1e-6)
    assert np.isneginf(as_data.lse[:, 1]).all()
