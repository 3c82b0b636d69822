"""What transformers computes comes out with the sequence over cp: every layout, every strategy, on every rank.

A program does not know the layout, which only deals tokens: one runner serves all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from oracle_checks import assert_logits, assert_tokens
from oracle_data import GGUF_ORACLES, ORACLES, ROOT, load_oracle
from sample_models import oracle_runner

import jaxpar
from jaxpar.attention import tiles
from jaxpar.errors import PlanError
from jaxpar.heads import split_heads
from jaxpar.layout import LAYOUTS
from jaxpar.mesh import MeshSpec
from jaxpar.registry import STRATEGIES
from jaxpar.runner import Runner

pytestmark = pytest.mark.usefixtures("unwritten_pages_are_nan")
ALL = [*ORACLES, *GGUF_ORACLES]
PREFILL = [s.name for s in STRATEGIES if s.sublayer == "prefill_attention" and "cp" in s.axes]
DECODE = [s.name for s in STRATEGIES if s.sublayer == "decode_attention" and "cp" in s.axes]
# The last has fewer KV heads than tp in most oracles; prompts of one token are shorter than any cp.
MESHES = ["cp=2", "cp=3", "cp=4", "cp=8", "dp=2,cp=2,tp=2", "cp=4,tp=2", "cp=2,tp=4"]
PAGES = {"page_size": 5}
PREFILL_PRODUCT = list(itertools.product(ALL, MESHES, PREFILL))
DECODE_PRODUCT = list(itertools.product(ALL, MESHES, DECODE))
# Each oracle once, in one phase or the other, and each strategy on a mesh or two.
PREFILL_CHOICE = [(name, MESHES[i % 7], PREFILL[i % 5]) for i, name in enumerate(ALL[::2])]
DECODE_CHOICE = [(name, MESHES[(i + 3) % 7], DECODE[i % 4]) for i, name in enumerate(ALL[1::2])]


@contextmanager
def layout_of(runner: Runner, layout: str) -> Iterator[None]:
    plan = runner.programs.plan
    runner.programs.plan = replace(plan, layout=layout)
    try:
        yield
    finally:
        runner.programs.plan = plan


def has_heads_for(name: str, mesh: str) -> bool:
    """Whether Ulysses leaves each rank of cp a query head."""
    config, sizes = oracle_runner(name, "tp=1").config, MeshSpec.parse(mesh)
    return split_heads(config.num_attention_heads, config.num_key_value_heads, sizes.tp).q_local >= sizes.cp


def assert_prefill(name: str, mesh: str, strategy: str, **plan: Any) -> None:
    oracle = load_oracle(name)
    if strategy == "ulysses" and not has_heads_for(name, mesh):
        with pytest.raises(PlanError, match="needs a query head for each of cp"):
            oracle_runner(name, mesh, prefill_attention=strategy)
        return
    runner = oracle_runner(name, mesh, **PAGES, prefill_attention=strategy, **plan)
    for layout in LAYOUTS:
        with layout_of(runner, layout):
            assert_logits(runner, oracle.prompts, oracle.logits)


def assert_decode(name: str, mesh: str, strategy: str, **plan: Any) -> None:
    oracle = load_oracle(name)
    assert oracle.margin > 0.01
    runner = oracle_runner(name, mesh, **PAGES, decode_attention=strategy, **plan)
    for layout in LAYOUTS:
        with layout_of(runner, layout):
            assert_tokens(runner, oracle.prompts, oracle.greedy)


@pytest.mark.parametrize(("name", "mesh", "strategy"), PREFILL_CHOICE)
def test_every_rank_has_the_logits_of_transformers_in_every_layout(name: str, mesh: str, strategy: str) -> None:
    assert_prefill(name, mesh, strategy)


@pytest.mark.parametrize(("name", "mesh", "strategy"), DECODE_CHOICE)
def test_every_rank_decodes_the_tokens_of_transformers_after_every_layout(name: str, mesh: str, strategy: str) -> None:
    assert_decode(name, mesh, strategy)


@pytest.mark.full
@pytest.mark.parametrize(("name", "mesh", "strategy"), sorted(set(PREFILL_PRODUCT) - set(PREFILL_CHOICE)))
def test_every_rank_has_the_logits_of_transformers_in_all_other_ways(name: str, mesh: str, strategy: str) -> None:
    assert_prefill(name, mesh, strategy)


@pytest.mark.full
@pytest.mark.parametrize(("name", "mesh", "strategy"), sorted(set(DECODE_PRODUCT) - set(DECODE_CHOICE)))
def test_every_rank_decodes_the_tokens_of_transformers_in_all_other_ways(name: str, mesh: str, strategy: str) -> None:
    assert_decode(name, mesh, strategy)


# A chunk sees the cached prefix and itself; with pages of 5, chunks of 4 and 7 leave the prefix inside a page.
@pytest.mark.parametrize(
    ("strategy", "chunk", "mesh"),
    [
        *((strategy, 4, "cp=2,tp=2") for strategy in PREFILL),
        *(
            pytest.param(name, 7, "cp=3", marks=[] if name in ("ring", "ulysses") else pytest.mark.full)
            for name in PREFILL
        ),
    ],
)
def test_a_prompt_in_chunks_over_cp_gives_the_logits_of_transformers(strategy: str, chunk: int, mesh: str) -> None:
    assert_prefill("mistral", mesh, strategy, chunk=chunk)  # its window of 5 slides over ranks, chunks and pages


# Prompts of 19 tokens, in tiles of 4 queries or fewer and 4 keys, of which most are left out.
@pytest.mark.parametrize("strategy", PREFILL)
def test_tiles_over_cp_give_the_logits_of_transformers(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILE_ROWS", 8)
    monkeypatch.setattr(tiles, "KEY_TILE", 4)
    oracle = load_oracle("mistral")
    runner = jaxpar.load(ROOT / "mistral", mesh="cp=2,tp=2", prefill_attention=strategy, **PAGES)
    for layout in LAYOUTS:
        with layout_of(runner, layout):
            assert_logits(runner, oracle.prompts, oracle.logits)


@pytest.mark.parametrize("plan", [
    {"prefill_attention": "usp", "ulysses_degree": 2},
    pytest.param({"prefill_attention": "usp", "ulysses_degree": 1}, marks=pytest.mark.full),
    {"cp_interleave": 2},
    {"decode_attention": "ag_rs", "decode_overlap": 2},
    {"decode_attention": "helix", "decode_overlap": 3, "sequence_parallel": True},
], ids=str)  # fmt: skip
def test_every_option_of_cp_gives_the_logits_and_tokens_of_transformers(plan: dict[str, Any]) -> None:
    oracle, runner = load_oracle("mistral"), oracle_runner("mistral", "cp=4,tp=2", chunk=11, **PAGES, **plan)
    assert_logits(runner, oracle.prompts, oracle.logits)
    assert_tokens(runner, oracle.prompts, oracle.greedy)
