"""Every way to add up gives the logits and tokens of transformers on every rank; codes come as near as they state."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from oracle_checks import assert_logits, assert_tokens
from oracle_data import load_oracle
from sample_models import oracle_runner, rank_logits

from jaxpar.registry import STRATEGIES

EXACT = {"fixed_order", "one_shot", "two_shot", "ring", "tree", "two_level"}
CODES = {strategy.name: strategy.lossy for strategy in STRATEGIES if strategy.lossy}
"""What logits may differ by, as a part of the largest: the sums of two layers each add an error to the residual."""

MESHES = ("tp=2", "tp=3", "tp=4", "tp=8", "cp=2,tp=2", "dp=2,ep=2,tp=2")
ORACLES = {mesh: "qwen3_moe" if "ep" in mesh else "llama_9_3" for mesh in MESHES}
# A few here, all others under `full`.
HERE = {("ring", "tp=8"), ("two_level", "cp=2,tp=2")}
CODES_HERE = {("int8", "tp=3")}
PAGES = {"page_size": 17}
pytestmark = pytest.mark.usefixtures("unwritten_pages_are_nan")


def plan_of(name: str, mesh: str) -> dict[str, object]:
    nodes = {"tp=8": 4, "tp=4": 2, "cp=2,tp=2": 2}.get(mesh, 1)
    return {**PAGES, "all_reduce": name, "devices_per_node": nodes if name == "two_level" else 0}


def assert_is_the_oracle(name: str, mesh: str) -> None:
    oracle = load_oracle(ORACLES[mesh])
    runner = oracle_runner(ORACLES[mesh], mesh, **plan_of(name, mesh))
    assert_logits(runner, oracle.prompts, oracle.logits)
    assert_tokens(runner, oracle.prompts, oracle.greedy)


def assert_is_near(name: str, mesh: str) -> None:
    oracle = load_oracle(ORACLES[mesh])
    runner = oracle_runner(ORACLES[mesh], mesh, **plan_of(name, mesh))
    largest = max(np.abs(logits).max() for logits in oracle.logits)
    off = max(
        np.abs(found - oracle.logits[request][tokens, ids]).max() / largest
        for _, request, tokens, ids, found in rank_logits(runner, oracle.prompts)
        if found.size
    )
    # Not exact, or nothing was sent as codes.
    assert 1e-4 < off < CODES[name]


@pytest.mark.parametrize(("name", "mesh"), sorted(HERE))
def test_every_rank_has_the_logits_and_tokens_of_transformers(name: str, mesh: str) -> None:
    assert_is_the_oracle(name, mesh)


@pytest.mark.parametrize(("name", "mesh"), sorted(CODES_HERE))
def test_codes_come_near_the_logits_of_transformers(name: str, mesh: str) -> None:
    assert_is_near(name, mesh)


@pytest.mark.full
@pytest.mark.parametrize(("name", "mesh"), sorted(set(itertools.product(EXACT, MESHES)) - HERE))
def test_every_rank_has_the_logits_and_tokens_of_transformers_on_all_other_meshes(name: str, mesh: str) -> None:
    assert_is_the_oracle(name, mesh)


@pytest.mark.full
@pytest.mark.parametrize(("name", "mesh"), sorted(set(itertools.product(CODES, MESHES)) - CODES_HERE))
def test_codes_come_near_the_logits_of_transformers_on_all_other_meshes(name: str, mesh: str) -> None:
    assert_is_near(name, mesh)


@pytest.mark.full
@pytest.mark.parametrize("name", ["ring", "one_shot"])
def test_a_residual_stream_split_over_tp_is_added_up_by_halves(name: str) -> None:
    oracle = load_oracle("qwen2_sliding")
    runner = oracle_runner("qwen2_sliding", "dp=2,tp=4", **PAGES, sequence_parallel=True, all_reduce=name)
    assert_logits(runner, oracle.prompts, oracle.logits)
    assert_tokens(runner, oracle.prompts, oracle.greedy)


def test_every_way_to_add_up_is_held_against_an_oracle() -> None:
    names = {strategy.name for strategy in STRATEGIES if strategy.sublayer == "all_reduce"}
    assert {"psum", *EXACT, "int8", "fp8"} == names
    assert set(CODES) == {"int8", "fp8"}
