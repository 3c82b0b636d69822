"""Balancing: the policies' exact choices, what holds of all of them, picking a copy, and loads over a window."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import error_of

from jaxpar.errors import PlanError
from jaxpar.moe.balance import Placement, in_order, over_mean, pick_copy, place
from jaxpar.moe.coactivation import SLACK, cut_weight, lower_cut
from jaxpar.moe.loads import LoadWindow
from jaxpar.moe.placement import NO_SLOT, slot_map

TWO_LAYERS = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]


def refusal(*arguments: Any, **named: Any) -> str:
    return error_of(lambda: place(*arguments, **named), PlanError)


# The exact choices


def test_the_global_policy_copies_the_hottest_experts_and_levels_four_devices() -> None:
    placed = place([[120, 40, 20, 20]], 8, 4)
    assert placed.slots.tolist() == [[0, 1, 0, 2, 0, 3, 0, 1]]
    assert placed.copies.tolist() == [[4, 2, 1, 1]]
    assert placed.device_loads.tolist() == [[50, 50, 50, 50]]


def test_one_group_a_node_leaves_nothing_to_level() -> None:
    placed = place([[120, 40, 20, 20]], 8, 4, groups=4, nodes=4)
    assert placed.slots.tolist() == [[0, 0, 1, 1, 2, 2, 3, 3]]
    assert placed.device_loads.tolist() == [[120, 40, 20, 20]]


def test_two_groups_a_node_are_leveled_within_the_node() -> None:
    loads = place([[120, 40, 20, 20]], 8, 4, groups=4, nodes=2).device_loads
    np.testing.assert_allclose(loads, [[80, 60, 100 / 3, 80 / 3]], rtol=1e-12)


def test_the_hierarchical_policy_on_two_layers_of_twelve_experts() -> None:
    placed = place(TWO_LAYERS, 16, 8, groups=4, nodes=2)
    assert placed.slots.tolist() == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]
    assert placed.copies.tolist() == [
        [1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1],
        [1, 2, 1, 1, 1, 2, 2, 1, 2, 1, 1, 1],
    ]
    assert placed.device_loads.tolist() == [
        [121.5, 86.5, 125, 113, 147.5, 131.5, 156, 152],
        [173, 179.5, 120.5, 172, 123, 152, 118.5, 117.5],
    ]


def test_one_expert_a_device_stays_where_it_is() -> None:
    placed = place([[3, 9, 1, 5], [0, 0, 8, 2]], 4, 4)
    assert placed.slots.tolist() == [[0, 1, 2, 3]] * 2


def test_ties_go_to_the_lowest_index() -> None:
    placed = place([[7, 7, 7, 7], [0, 0, 0, 0]], 6, 2)
    assert placed.copies.tolist() == [[2, 2, 1, 1], [3, 1, 1, 1]]
    # 2 and 3 are the heaviest (7), then the slots of 0 and 1 (3.5) in the order in which they were made: 0, 1, 0, 1.
    # Without loads the first device is the lightest until it is full.
    assert placed.slots.tolist() == [[2, 0, 0, 3, 1, 1], [0, 1, 2, 3, 0, 0]]


def test_greedy_packing_can_be_worse_than_a_lucky_order() -> None:
    loads = [[3, 3, 0, 2, 2, 2]]
    assert in_order(loads, 2).tolist() == [[6, 6]]
    assert place(loads, 6, 2).device_loads.tolist() == [[7, 5]]


# What always holds


@st.composite
def arguments(draw: st.DrawFn) -> dict[str, Any]:
    """Loads of any shape with numbers that divide: from no copies to many, zeros among the loads."""
    nodes, groups_a_node, group, devices_a_node = (draw(st.integers(1, 3)) for _ in range(4))
    groups, devices = nodes * groups_a_node, nodes * devices_a_node
    experts = groups * group
    least = -(-experts // devices)
    slots = devices * draw(st.integers(least, least + 3))
    load = st.integers(0, 50) | st.floats(0, 1e6, allow_subnormal=False)
    row = st.lists(load, min_size=experts, max_size=experts)
    loads = draw(st.lists(row, min_size=1, max_size=2))
    return {"loads": np.array(loads, float), "slots": slots, "devices": devices, "groups": groups, "nodes": nodes}


def nodes_of(placed: Placement, nodes: int) -> list[list[set[int]]]:
    """The nodes on which each expert of each layer has a slot."""
    a_node = placed.slots.shape[1] // nodes
    experts = range(placed.copies.shape[1])
    return [[{*(np.flatnonzero(slots == expert) // a_node).tolist()} for expert in experts] for slots in placed.slots]


@given(arguments())
def test_every_slot_has_an_expert_and_every_expert_its_slots(asked: dict[str, Any]) -> None:
    placed = place(**asked)
    layers, experts = asked["loads"].shape
    assert placed.slots.shape == (layers, asked["slots"])
    assert (placed.copies >= 1).all()
    assert (placed.copies.sum(axis=1) == asked["slots"]).all()
    for slots, copies in zip(placed.slots, placed.copies, strict=True):
        found = slot_map(slots, experts)
        assert found.copies.tolist() == copies.tolist()
        for expert, (own, count) in enumerate(zip(found.slots_of, copies, strict=True)):
            assert own[:count].tolist() == np.flatnonzero(slots == expert).tolist()
            assert (own[count:] == NO_SLOT).all()


@given(arguments())
def test_device_loads_are_those_of_their_slots_and_nothing_is_lost(asked: dict[str, Any]) -> None:
    placed = place(**asked)
    for layer, loads in enumerate(asked["loads"]):
        shares = [loads[expert] / placed.copies[layer, expert] for expert in placed.slots[layer]]
        devices = np.split(np.array(shares), asked["devices"])
        np.testing.assert_allclose(placed.device_loads[layer], [mine.sum() for mine in devices])
        np.testing.assert_allclose(placed.device_loads[layer].sum(), loads.sum())


@given(arguments())
def test_every_group_lies_on_one_node_and_nodes_have_as_many(asked: dict[str, Any]) -> None:
    size = asked["loads"].shape[1] // asked["groups"]
    for layer in nodes_of(place(**asked), asked["nodes"]):
        groups = [set.union(*layer[first : first + size]) for first in range(0, len(layer), size)]
        assert all(len(nodes) == 1 for nodes in groups)
        held = np.bincount([node for nodes in groups for node in nodes])
        assert held.tolist() == [asked["groups"] // asked["nodes"]] * asked["nodes"]


@given(arguments())
def test_devices_of_a_node_differ_by_no_more_than_its_heaviest_copy(asked: dict[str, Any]) -> None:
    placed = place(**asked)
    for layer, loads in enumerate(asked["loads"]):
        per_copy = (loads / placed.copies[layer])[placed.slots[layer]]
        heaviest = per_copy.reshape(asked["nodes"], -1).max(axis=1)
        of_node = placed.device_loads[layer].reshape(asked["nodes"], -1)
        assert (np.ptp(of_node, axis=1) <= heaviest * (1 + 1e-9) + 1e-9).all()


@given(st.lists(st.integers(0, 30), min_size=1, max_size=4), st.integers(0, 5))
def test_no_other_copies_have_a_smaller_largest_load_per_copy(loads: list[int], extra: int) -> None:
    experts = len(loads)

    def all_copies(left: int, over: int) -> list[tuple[int, ...]]:
        if over == 1:
            return [(left,)]
        return [(first, *rest) for first in range(1, left) for rest in all_copies(left - first, over - 1)]

    largest = (np.array(loads) / place([loads], experts + extra, 1).copies[0]).max()
    every = [copies for copies in all_copies(experts + extra, experts) if min(copies) >= 1]
    best = min(max(load / count for load, count in zip(loads, copies, strict=True)) for copies in every)
    assert largest == pytest.approx(best)


@given(arguments())
def test_slots_for_the_experts_alone_make_no_copies(asked: dict[str, Any]) -> None:
    placed = place(asked["loads"], asked["loads"].shape[1], 1)
    assert (placed.copies == 1).all()


# Before, and against the mean


def test_without_balancing_experts_are_in_order_and_the_first_devices_have_one_more() -> None:
    assert in_order([[1, 2, 4, 8, 16], [1, 1, 1, 1, 1]], 3).tolist() == [[3, 12, 16], [2, 2, 1]]
    assert in_order([[5, 6]], 4).tolist() == [[5, 6, 0, 0]]


def test_loads_over_the_mean_are_one_in_a_layer_without_loads() -> None:
    np.testing.assert_allclose(over_mean(np.array([[3.0, 1, 0, 0], [0, 0, 0, 0]])), [[3, 1, 0, 0], [1, 1, 1, 1]])
    assert over_mean(np.array([[5e-324, 0.0]])).tolist() == [[2, 0]]


# Picking a copy


@pytest.mark.parametrize(("copies", "tokens"), [(1, [64]), (2, [32, 32]), (3, [23, 21, 20])])
def test_sixty_four_tokens_over_the_copies_of_an_expert(copies: int, tokens: list[int]) -> None:
    picked = pick_copy(np.arange(64), np.full(64, copies))
    assert np.bincount(picked).tolist() == tokens


def test_tokens_whose_index_goes_with_their_routing_are_spread_all_the_same() -> None:
    every_third = 3 * np.arange(64)
    assert np.bincount(pick_copy(every_third, np.array(3))).min() >= 18


def test_jax_picks_the_copies_that_numpy_does() -> None:
    tokens = np.array([-1, 0, 1, 2, 63, 2**16, 2**31 - 1], np.int32)
    copies = np.array([3, 1, 2, 3, 5, 7, 4], np.int32)
    expected = [(int(token) * 2654435769 % 2**32) % int(count) for token, count in zip(tokens, copies, strict=True)]
    in_numpy, in_jax = pick_copy(tokens, copies), jax.jit(pick_copy)(jnp.asarray(tokens), jnp.asarray(copies))
    assert in_numpy.tolist() == in_jax.tolist() == expected
    assert in_numpy.dtype == in_jax.dtype == np.int32


# Experts that are chosen together


def planted(experts: int, nodes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Pairs chosen together ten times as often within hidden parts, loads as the diagonal, and each expert's part."""
    random = np.random.default_rng(seed)
    part = random.permutation(np.arange(experts) * nodes // experts)
    often = np.where(part[:, None] == part, 100, 10)
    upper = np.triu(random.poisson(often), 1)
    return upper + upper.T + np.diag(upper.sum(axis=0) + upper.sum(axis=1)), part


def sides(placed: Placement, nodes: int) -> np.ndarray:
    """The node of each expert [layers, experts]."""
    return np.array([[node for (node,) in layer] for layer in nodes_of(placed, nodes)])


@pytest.mark.parametrize(("experts", "nodes"), [(8, 2), (24, 3), (64, 4)])
def test_experts_that_are_chosen_together_share_a_node(experts: int, nodes: int) -> None:
    together, part = zip(*(planted(experts, nodes, seed) for seed in range(3)), strict=True)
    loads = np.array([np.diag(pairs) for pairs in together])
    asked = {"slots": experts + 2 * nodes, "devices": 2 * nodes, "groups": experts, "nodes": nodes}
    found = sides(place(loads, **asked, together=np.array(together)), nodes)
    for layer in range(3):
        assert len({*zip(found[layer].tolist(), part[layer].tolist(), strict=True)}) == nodes, "a hidden part is split"


def test_groups_stay_whole_where_they_are_chosen_together() -> None:
    together = np.zeros((1, 8, 8), int)
    for one, other, often in ((0, 7, 9), (2, 5, 9), (1, 2, 1)):  # groups 0 and 3, and 1 and 2, of two experts
        together[0, one, other] = together[0, other, one] = often
    placed = place(np.ones((1, 8)), 8, 2, groups=4, nodes=2, together=together)
    assert sides(placed, 2).tolist() in ([[0, 0, 1, 1, 1, 1, 0, 0]], [[1, 1, 0, 0, 0, 0, 1, 1]])


@st.composite
def graphs(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Groups of each node in any order, their loads, and any pairs."""
    nodes, a_node = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    groups = nodes * a_node
    dealt = np.array(draw(st.permutations(range(groups)))).reshape(nodes, a_node)
    loads = np.array(draw(st.lists(st.integers(0, 20), min_size=groups, max_size=groups)), float)
    pairs = draw(st.lists(st.integers(0, 9), min_size=groups**2, max_size=groups**2))
    upper = np.array(pairs, float).reshape(groups, groups)
    return dealt, loads, upper + upper.T


@given(graphs())
def test_the_cut_never_rises_and_no_node_gets_heavier_than_allowed(
    graph: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> None:
    dealt, loads, together = graph
    improved = lower_cut(dealt, loads, together)
    assert improved.shape == dealt.shape
    assert sorted(improved.ravel().tolist()) == sorted(dealt.ravel().tolist())
    cuts = []
    for nodes in (dealt, improved):
        node_of = np.empty(nodes.size, int)
        node_of[nodes] = np.arange(len(nodes))[:, None]
        pairs = [(i, j) for i in range(nodes.size) for j in range(i) if node_of[i] != node_of[j]]
        cuts.append(sum(together[pair] for pair in pairs))
        assert cut_weight(together, node_of) == cuts[-1]
    assert cuts[1] <= cuts[0]
    most = max(loads[dealt].sum(axis=1).max(), (1 + SLACK) * loads.sum() / len(dealt))
    assert loads[improved].sum(axis=1).max() <= most * (1 + 1e-9)


def test_a_swap_that_saves_nothing_is_made_where_the_next_one_saves_more() -> None:
    together = np.zeros((8, 8))
    for one, other in ((0, 1), (2, 3), (3, 4)):
        together[one, other] = together[other, one] = 1
    halves = np.arange(8).reshape(2, 4)  # cut 3-4; 0 and 1 have to make room for one more
    assert lower_cut(halves, np.ones(8), together).tolist() == [[2, 3, 4, 5], [0, 1, 6, 7]]


def test_a_smaller_cut_is_not_worth_an_overloaded_node() -> None:
    together = np.zeros((4, 4))
    together[0, 1] = together[1, 0] = 1
    dealt = np.array([[0, 2], [1, 3]])
    assert lower_cut(dealt, np.array([10.0, 10, 1, 1]), together).tolist() == [[0, 2], [1, 3]]
    assert lower_cut(dealt, np.array([10.0, 10, 9.5, 9.5]), together).tolist() in ([[0, 1], [2, 3]], [[2, 3], [0, 1]])


# Loads over a window


@given(st.integers(1, 4), st.lists(st.tuples(st.booleans(), st.integers(0, 9)), min_size=1, max_size=9))
def test_a_window_has_the_sum_of_its_latest_steps_over_all_ranks(length: int, steps: list[tuple[bool, int]]) -> None:
    window, given = LoadWindow(length), []
    for is_read, count in steps:
        # Ranks, layers and experts that all have other loads.
        given.append(count * np.arange(1, 13, dtype=np.int32).reshape(2, 2, 3))
        window.add(jnp.asarray(given[-1]))
        if is_read:
            assert window.loads.tolist() == np.sum(given[-length:], axis=(0, 1)).tolist()
    assert window.loads.tolist() == np.sum(given[-length:], axis=(0, 1)).tolist()
    assert window.loads.dtype == np.int64


def test_a_window_without_a_step_has_no_loads() -> None:
    said = "no step has counted loads yet: generate first, or give loads"
    assert error_of(lambda: LoadWindow(2).loads, PlanError) == said


# Refusals


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ((3, 1), "3 slots for 4 experts: use 4 or more"),
        ((6, 4), "6 slots on 4 devices: each has as many; use a multiple of 4, such as 8"),
        ((8, 4, 4, 3), "4 devices on 3 nodes: each has as many; use a number of nodes that divides 4"),
        ((8, 4, 3), "4 experts in 3 groups: each has as many; use a number of groups that divides 4"),
        (
            (8, 4, 1, 2),
            "1 group on 2 nodes: a group stays on one node, and each has as many; "
            "use a multiple of 2 groups, or leave groups and nodes out for the global policy",
        ),
        ((0, 4), "slots=0: it must be a whole number from 1 to 4096"),
        ((4097, 1), "slots=4097: it must be a whole number from 1 to 4096"),
        ((8, 2.0), "devices=2.0: it must be a whole number from 1 to 4096"),
        ((8, 4, True), "groups=True: it must be a whole number from 1 to 4096"),
        ((8, 4, 1, -1), "nodes=-1: it must be a whole number from 1 to 4096"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(asked: tuple[Any, ...], said: str) -> None:
    assert refusal([[1, 2, 3, 4]], *asked) == said


@pytest.mark.parametrize(
    ("loads", "said"),
    [
        ([1, 2], "loads are int64 [2]: give numbers [layers, experts], one or more"),
        (np.zeros((0, 2)), "loads are float64 [0, 2]: give numbers [layers, experts], one or more"),
        ([[1, 2], [3]], "loads have layers of different lengths: every layer has as many experts"),
        ([[True, False]], "loads are bool [1, 2]: give numbers [layers, experts], one or more"),
        ([[1, 2], [3, -1]], "layer 1, expert 1 has the load -1.0: it must be from 0, and finite"),
        ([[float("nan"), 2]], "layer 0, expert 0 has the load nan: it must be from 0, and finite"),
        ([[1, float("inf")]], "layer 0, expert 1 has the load inf: it must be from 0, and finite"),
        ([[1e308, 1e308]], "loads up to 1e+308 add up to infinity: give them in a larger unit"),
        (np.ones((257, 1)), "loads are of 257 layers and 1 expert: give at most 256 layers and 2048 experts"),
    ],
)
def test_what_no_load_can_be_is_refused(loads: Any, said: str) -> None:
    assert refusal(loads, 4, 2) == said
    assert error_of(lambda: in_order(loads, 2), PlanError) == said


def test_counts_of_pairs_that_are_none_are_refused() -> None:
    loads, asked = [[1, 2]], {"slots": 2, "devices": 2, "groups": 2, "nodes": 2}
    for together, said in (
        ([[0, 1], [1, 0]], "int64 [2, 2]: give whole numbers [layers, experts, experts], [1, 2, 2]"),
        ([[[0.0, 1], [1, 0]]], "float64 [1, 2, 2]: give whole numbers [layers, experts, experts], [1, 2, 2]"),
    ):
        assert refusal(loads, **asked, together=together) == f"co-activation is {said}"
    assert refusal(loads, **asked, together=[[[0, -1], [-1, 0]]]) == (
        "co-activation holds -1: a count is a whole number from 0"
    )
    assert refusal(loads, **asked, together=[[[0, 1], [2, 0]]]) == (
        "layer 0: experts 0 and 1 are chosen together 1 times, and 1 and 0 2 times: count a pair the same both ways"
    )
    assert refusal(loads, 2, 2, together=[[[0, 1], [1, 0]]]) == (
        "nodes=1: co-activation says which experts share a node; use 2 nodes or more, or leave it out"
    )
