"""Which layers a stage of a pipeline has, and in which of its slots."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle_data import ROOT

from jaxpar.checkpoint import open_checkpoint
from jaxpar.checkpoint.config import ModelConfig
from jaxpar.errors import PlanError
from jaxpar.mesh import MeshSpec
from jaxpar.pipeline.balance import balanced_layers, layer_work
from jaxpar.pipeline.stages import aligned, layers_of_stages, moe_layer_of, slots_of
from jaxpar.plan import Plan
from jaxpar.strategies import Step


def config(name: str = "llama", **fields: Any) -> ModelConfig:
    return replace(open_checkpoint(ROOT / name).config, **fields)


def cut(layers: int, pp: int, stages: Any = "even") -> tuple[int, ...]:
    return layers_of_stages(config(num_hidden_layers=layers), Plan(MeshSpec(pp=pp), stages=stages))


# How many layers each stage has


@pytest.mark.parametrize(
    ("layers", "pp", "counts"),
    [(61, 4, (16, 15, 15, 15)), (8, 4, (2, 2, 2, 2)), (7, 3, (3, 2, 2)), (3, 3, (1, 1, 1)), (5, 1, (5,))],
)
def test_even_stages_differ_by_one_layer_and_the_first_ones_have_more(
    layers: int, pp: int, counts: tuple[int, ...]
) -> None:
    assert cut(layers, pp) == counts


def test_a_tail_of_half_a_stage_takes_seven_layers_from_the_last_of_four() -> None:
    assert balanced_layers([1.0] * 61, 4, last=0.5 * 61 / 4) == (17, 17, 17, 10)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(1, 4), st.integers(0, 20), st.integers(0, 20))
def test_no_other_cut_has_a_faster_slowest_stage(work: list[int], stages: int, first: int, last: int) -> None:
    stages = min(stages, len(work))

    def slowest(counts: tuple[int, ...]) -> int:
        stops = [sum(counts[:stage]) for stage in range(stages + 1)]
        of_stages = [sum(work[start:stop]) for start, stop in itertools.pairwise(stops)]
        of_stages[0] += first
        of_stages[-1] += last
        return max(of_stages)

    cuts = [counts for counts in itertools.product(range(1, len(work) + 1), repeat=stages) if sum(counts) == len(work)]
    found = balanced_layers(work, stages, first, last)
    assert found in cuts
    assert slowest(found) == min(map(slowest, cuts))


def test_a_large_vocabulary_takes_layers_from_the_last_stage() -> None:
    llama = config(num_hidden_layers=12)
    of_layer = layer_work(llama, 0)
    # A head of the work of three layers: 15 in all. The row of the embedding decides which stage has one layer less.
    large = replace(llama, vocab_size=3 * of_layer // llama.hidden_size)
    plan = Plan(MeshSpec(pp=4), stages="balanced")
    assert layers_of_stages(large, plan) == (3, 4, 4, 1)


def test_a_layer_counts_the_weights_that_a_token_passes() -> None:
    llama, v3 = config("llama"), config("deepseek_v3")
    hidden, size = llama.hidden_size, llama.head_dim
    heads, kv = llama.num_attention_heads, llama.num_key_value_heads
    attention = hidden * size * (2 * heads + 2 * kv)
    assert layer_work(llama, 0) == attention + 3 * hidden * llama.intermediate_size
    assert v3.moe is not None and v3.moe.layers == (False, True, True)
    dense, experts = 3 * v3.hidden_size * v3.intermediate_size, v3.hidden_size * v3.moe.num_experts
    experts += 3 * v3.hidden_size * (v3.moe.router.top_k * v3.moe.intermediate_size + v3.moe.shared_intermediate_size)
    assert layer_work(v3, 0) - layer_work(v3, 1) == dense - experts


@pytest.mark.parametrize("given", ["17,17,17,10", " 17, 17 ,17,10", [17, 17, 17, 10], (17, 17, 17, 10)])
def test_layers_of_each_stage_may_be_given(given: Any) -> None:
    assert Plan(MeshSpec(pp=4), stages=given).stages == "17,17,17,10"
    assert cut(61, 4, given) == (17, 17, 17, 10)


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ("17,17,27", "stages=17,17,27 has 3 numbers for pp=4: give the layers of each of 4 stages, or pp=3"),
        ("17,17,17,9", "stages=17,17,17,9 are 60 layers and the model has 61: give 4 numbers that add up to 61"),
        ([61, 0, 0, 0], "stages=61,0,0,0: stage 1 has 0 layers; give each at least 1"),
        ("-1,2,30,30", "stages='-1,2,30,30': give"),
        ("odd", 'stages=\'odd\': give "even", "balanced", or the layers of each stage, such as "17,17,17,10"'),
        (True, "stages=True: give"),
        ([20.5, 20.5, 10, 10], "stages=[20.5, 20.5, 10, 10]: give"),
        (None, "stages=None: give"),
        ("", "stages='': give"),
    ],
)
def test_stages_that_cannot_be_are_refused(stages: Any, said: str) -> None:
    with pytest.raises(PlanError) as raised:
        cut(61, 4, stages)
    assert str(raised.value).startswith(said)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(PlanError, match=r"^pp=4 for 3 layers: a stage needs one at least; use pp <= 3$"):
        cut(3, 4)


# In which slots they are

KINDS = st.lists(st.booleans(), min_size=1, max_size=12)


@given(KINDS, st.data())
def test_every_layer_is_in_one_slot_of_its_stage_and_in_order(kinds: list[bool], data: Any) -> None:
    stages = data.draw(st.integers(1, min(4, len(kinds))))
    edges = sorted(data.draw(st.permutations(range(1, len(kinds))))[: stages - 1])
    counts = tuple(stop - start for start, stop in itertools.pairwise([0, *edges, len(kinds)]))
    slots = aligned(counts, tuple(kinds))
    assert len(slots) == max(counts)
    held = [[slot[stage] for slot in slots if slot[stage] is not None] for stage in range(stages)]
    assert [len(layers) for layers in held] == list(counts)
    assert [*itertools.chain(*held)] == list(range(len(kinds)))
    if len(kinds) <= 8:
        assert mixed(slots, kinds) == min(mixed(other, kinds) for other in placements(counts))


def mixed(slots: Any, kinds: list[bool]) -> int:
    return sum(len({kinds[layer] for layer in slot if layer is not None}) > 1 for slot in slots)


def placements(counts: tuple[int, ...]) -> Any:
    """All ways of dealing layers to as many slots as the fullest stage has layers."""
    slots = range(max(counts))
    for chosen in itertools.product(*(itertools.combinations(slots, count) for count in counts)):
        layers = itertools.count()
        stages = [dict(zip(places, layers, strict=False)) for places in chosen]
        yield tuple(tuple(stage.get(slot) for stage in stages) for slot in slots)


def test_one_stage_has_a_layer_in_every_slot() -> None:
    assert slots_of(config("deepseek_v3"), Plan()) == ((0,), (1,), (2,))


def test_an_absent_slot_keeps_a_dense_layer_from_layers_with_experts() -> None:
    v3 = config("deepseek_v3")
    assert v3.moe is not None and v3.moe.layers == (False, True, True)
    assert slots_of(v3, Plan(MeshSpec(pp=2))) == ((0, None), (1, 2))
    assert moe_layer_of(v3, Plan(MeshSpec(pp=2))) == [(0, 0), (1, 0)]
    assert slots_of(v3, Plan(MeshSpec(pp=3))) == ((0, 1, 2),)
    assert moe_layer_of(v3, Plan(MeshSpec(pp=3))) == [(1, 0), (2, 0)]


@pytest.mark.parametrize(
    ("name", "pp", "layers", "dense", "experts"),
    [("llama", 2, 1, 1, 0), ("deepseek_v3", 2, 2, 1, 1), ("deepseek_v3", 3, 1, 1, 1), ("qwen3_moe_dense", 2, 2, 2, 1)],
)
def test_a_step_counts_slots_and_those_of_both_kinds_twice(
    name: str, pp: int, layers: int, dense: int, experts: int
) -> None:
    step = Step(config(name), Plan(MeshSpec(pp=pp)), "decode", lanes=1, tokens=1, keys=16)
    assert (step.layers, step.dense_layers, step.moe_layers) == (layers, dense, experts)
