"""What transformers computes for each architecture comes out on every mesh, on every rank.

Every cache begins as NaN, so that a page which nobody wrote cannot be read without showing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import jax
import numpy as np
import pytest
from oracle_checks import assert_logits, assert_tokens
from oracle_data import GGUF_ORACLES, ORACLES, load_oracle
from sample_models import oracle_runner, rank_logits

Record = Callable[[str, object], None]
ALL = [*ORACLES, *GGUF_ORACLES]
ASYMMETRIC = ["dp=2,tp=4", "dp=4,tp=2"]
AWKWARD = ["tp=3", "tp=5", "tp=6", "tp=7", "tp=8", "dp=2,tp=3", "dp=3,tp=2", "tp=2"]
MESHES = ["tp=1", *ASYMMETRIC, *AWKWARD, "tp=4", "dp=8"]
# Each oracle on one device, and on one of the asymmetric or awkward meshes in turn: each mesh sees an oracle.
PAIRS = [(oracle, mesh) for i, oracle in enumerate(ALL) for mesh in ("tp=1", [*ASYMMETRIC, *AWKWARD][i % 10])]
pytestmark = pytest.mark.usefixtures("unwritten_pages_are_nan")
# Pages of 17: the prompts of 19 tokens end in the middle of their second page, and no program compiles twice.
PAGES = {"page_size": 17}


def assert_is_the_oracle(name: str, mesh: str, record_property: Record) -> None:
    oracle, runner = load_oracle(name), oracle_runner(name, mesh, **PAGES)
    # A hundred times what logits may differ by: no tie explains a token that differs.
    assert oracle.margin > 0.01
    record_property("margin", oracle.margin)
    assert_logits(runner, oracle.prompts, oracle.logits)
    assert_tokens(runner, oracle.prompts, oracle.greedy)


@pytest.mark.parametrize(("name", "mesh"), PAIRS)
def test_every_rank_has_the_logits_and_tokens_of_transformers(name: str, mesh: str, record_property: Record) -> None:
    assert_is_the_oracle(name, mesh, record_property)


@pytest.mark.full
@pytest.mark.parametrize(("name", "mesh"), sorted(set(itertools.product(ALL, MESHES)) - set(PAIRS)))
def test_every_rank_has_the_logits_and_tokens_of_transformers_on_all_other_meshes(
    name: str, mesh: str, record_property: Record
) -> None:
    assert_is_the_oracle(name, mesh, record_property)


@pytest.mark.parametrize("mesh", ASYMMETRIC)
def test_a_residual_stream_split_over_tp_gives_the_logits_and_tokens_of_transformers(mesh: str) -> None:
    oracle = load_oracle("qwen2_sliding")
    runner = oracle_runner("qwen2_sliding", mesh, **PAGES, sequence_parallel=True)
    assert_logits(runner, oracle.prompts, oracle.logits)
    assert_tokens(runner, oracle.prompts, oracle.greedy)


# Prompts of 16 and 4 tokens fill their pages exactly; those of 19 and 1 end in the middle of one.
LENGTHS = (19, 16, 4, 1)
CHUNKS, PAGE_SIZES = (1, 3, 5, 8, 512), (1, 4, 16)
CHUNKED = [(1, 4), (1, 16), (3, 1), (3, 4), (5, 4), (5, 16), (8, 1), (8, 4), (8, 16), (512, 1), (512, 4), (512, 16)]


def assert_chunks_and_pages_do_not_matter(chunk: int, page_size: int) -> None:
    oracle = load_oracle("mistral")  # its window of 5 slides over chunks and pages
    longest = max(range(len(oracle.prompts)), key=lambda i: len(oracle.prompts[i]))
    prompts = [oracle.prompts[longest][:length] for length in LENGTHS]
    expected = [oracle.logits[longest][:length] for length in LENGTHS]
    assert_logits(oracle_runner("mistral", "dp=2,tp=2", chunk=chunk, page_size=page_size), prompts, expected)


@pytest.mark.parametrize(("chunk", "page_size"), CHUNKED)
def test_any_chunk_and_page_size_gives_the_logits_of_transformers(chunk: int, page_size: int) -> None:
    assert_chunks_and_pages_do_not_matter(chunk, page_size)


@pytest.mark.full
@pytest.mark.parametrize(("chunk", "page_size"), sorted(set(itertools.product(CHUNKS, PAGE_SIZES)) - set(CHUNKED)))
def test_all_other_chunk_and_page_sizes_give_the_logits_of_transformers(chunk: int, page_size: int) -> None:
    assert_chunks_and_pages_do_not_matter(chunk, page_size)


def test_a_prompt_that_fills_its_page_goes_on_in_the_next() -> None:
    oracle = load_oracle("qwen2_sliding")
    full = [i for i, prompt in enumerate(oracle.prompts) if len(prompt) == 19]
    prompts, greedy = [oracle.prompts[i] for i in full], [oracle.greedy[i] for i in full]
    assert_tokens(oracle_runner("qwen2_sliding", "tp=2", page_size=19), prompts, greedy)


@pytest.mark.parametrize("mesh", ASYMMETRIC)
@pytest.mark.parametrize("count", [1, 3])
def test_any_number_of_requests_runs_over_dp_also_with_replicas_that_have_none(mesh: str, count: int) -> None:
    oracle, runner = load_oracle("llama_9_3"), oracle_runner("llama_9_3", mesh, **PAGES)
    chosen = sorted(range(len(oracle.prompts)), key=lambda i: -len(oracle.prompts[i]))[:count]
    prompts = [oracle.prompts[i] for i in chosen]
    assert_logits(runner, prompts, [oracle.logits[i] for i in chosen])
    assert_tokens(runner, prompts, [oracle.greedy[i] for i in chosen])


def test_nothing_of_an_unwritten_page_is_left_in_any_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    oracle, runner = load_oracle("qwen2_sliding"), oracle_runner("qwen2_sliding", "dp=2,tp=2", chunk=8, page_size=8)
    over_nan = list(rank_logits(runner, oracle.prompts))
    monkeypatch.undo()
    over_zeros = list(rank_logits(runner, oracle.prompts))
    for (*place, nan), (*same_place, zeros) in zip(over_nan, over_zeros, strict=True):
        jax.tree.map(np.testing.assert_array_equal, place, same_place)
        np.testing.assert_array_equal(nan, zeros)
