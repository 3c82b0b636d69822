"""Experts on slots with copies: the map, the moves between two placements, and rebalancing while a model serves."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from oracle_data import ROOT, load_oracle
from sample_models import open_session, oracle_runner
from uniform import uniform_control_violations

import jaxpar
from jaxpar import MeshSpec, Plan, PlanError
from jaxpar.checkpoint import open_checkpoint
from jaxpar.checkpoint.config import MoEConfig
from jaxpar.devices import ensure_devices, make_mesh
from jaxpar.ledger.trace import trace_traffic
from jaxpar.moe.balance import device_loads, over_mean, pick_copy, place
from jaxpar.moe.moves import keep_in_place, plan_moves
from jaxpar.moe.placement import NO_SLOT, place_experts, slot_map
from jaxpar.moe.rebalance import EXPERT_ARRAYS
from jaxpar.moe.relocate import relocation
from jaxpar.nn.moe import token_numbers
from jaxpar.runner import Runner

# The map


def test_the_map_has_every_slot_of_every_expert() -> None:
    found = slot_map(np.array([2, 0, 1, 0, 0, 2]), experts=3)
    assert found.slots_of.tolist() == [[1, 3, 4, NO_SLOT], [2, NO_SLOT, NO_SLOT, NO_SLOT], [0, 5, NO_SLOT, NO_SLOT]]
    assert found.copies.tolist() == [3, 1, 2]


def test_tokens_decoded_together_go_to_all_copies_as_do_those_of_a_prompt() -> None:
    spec = MeshSpec(dp=2, ep=2)
    plan = Plan(spec)
    lanes = P(plan.requests)
    numbers = jax.jit(
        jax.shard_map(
            lambda positions: token_numbers(positions, plan),
            mesh=make_mesh(spec, ensure_devices(spec)),
            in_specs=lanes,
            out_specs=lanes,
        )
    )
    # A lane on each of four replicas, all at the same position; two lanes of each.
    for lanes_of_each in (1, 2):
        decoded = np.asarray(numbers(np.full((4 * lanes_of_each, 1), 17, np.int32)))
        assert decoded[:, 0].tolist() == [*range(17, 17 + 4 * lanes_of_each)]
        for copies in (2, 4):
            chosen = pick_copy(decoded, np.full(1, copies))
            assert np.bincount(chosen[:, 0]).tolist() == [4 * lanes_of_each // copies] * copies
    prompt = np.asarray(numbers(np.arange(4 * 64, dtype=np.int32).reshape(4, 64)))
    for row in prompt:
        assert np.bincount(pick_copy(row, np.full(1, 3))).min() >= 64 // 3 - 2


def model(name: str) -> MoEConfig:
    moe = open_checkpoint(ROOT / name).config.moe
    assert moe is not None
    return moe


def test_groups_of_experts_stay_on_nodes_where_the_router_chooses_groups() -> None:
    moe = model("deepseek_v3")
    loads = np.random.default_rng(0).integers(1, 99, (2, moe.num_experts))
    by_nodes = Plan(MeshSpec(dp=2, ep=4), experts_over=("dp", "ep"), expert_slots=16, devices_per_node=4)
    in_groups = place_experts(moe, by_nodes, loads)
    np.testing.assert_array_equal(in_groups.slots, place(loads, 16, 8, groups=4, nodes=2).slots)
    nodes_of_groups = [{slot // 8 for slot in np.flatnonzero(in_groups.slots[0] // 3 == group)} for group in range(4)]
    assert all(len(nodes) == 1 for nodes in nodes_of_groups)
    for other in (
        place_experts(moe, Plan(MeshSpec(ep=8), expert_slots=16, devices_per_node=4), loads),  # ep lies on both
        place_experts(model("qwen3_moe"), by_nodes, loads[:, :8]),
    ):
        experts = other.copies.shape[1]
        np.testing.assert_array_equal(other.slots, place(loads[:, :experts], 16, 8).slots)


# Moves

RANKS, SLOTS, EXPERTS = 4, 3, 7


@st.composite
def placements(draw: st.DrawFn) -> np.ndarray:
    """Any experts on RANKS * SLOTS slots, each at least once."""
    copies = draw(st.lists(st.integers(0, EXPERTS - 1), min_size=5, max_size=5))
    return np.array(draw(st.permutations([*range(EXPERTS), *copies])))


@given(placements(), placements(), st.sampled_from([1, 2]))
def test_as_much_as_can_stays_where_it_is_on_the_ranks_of_a_node(old: np.ndarray, new: np.ndarray, nodes: int) -> None:
    kept = keep_in_place(old, new, RANKS, nodes)
    asked, got = (
        [sorted(map(sorted, node)) for node in slots.reshape(nodes, -1, SLOTS).tolist()] for slots in (new, kept)
    )
    assert asked == got, "each rank has what another rank of its node would have had"
    for before, after in zip(old.reshape(RANKS, SLOTS), kept.reshape(RANKS, SLOTS), strict=True):
        for expert in {*before} & {*after}:
            stay = min((before == expert).sum(), (after == expert).sum())
            assert ((before == expert) & (after == expert)).sum() == stay


def test_a_placement_that_only_names_ranks_and_slots_otherwise_moves_nothing() -> None:
    old = np.array([0, 1, 2, 3, 4, 5, 6, 0, 3, 1, 5, 6])
    new = np.array([6, 1, 5, 2, 0, 1, 0, 3, 6, 5, 4, 3])
    assert keep_in_place(old, new, RANKS).tolist() == old.tolist()
    of_nodes = keep_in_place(old, new, RANKS, nodes=2)
    assert of_nodes.tolist() == [0, 1, 2, 6, 1, 5, 6, 0, 3, 4, 5, 3]


@cache
def mover() -> tuple[Any, Any]:
    """The program for two arrays of experts over dp and ep, one of them with its width over tp; and their shardings."""
    spec = MeshSpec(dp=2, ep=2, tp=2)
    mesh = make_mesh(spec, ensure_devices(spec))
    specs = {"wide": P(None, ("dp", "ep"), "tp"), "narrow": P(None, ("dp", "ep"))}
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    return relocation(mesh, specs, ("dp", "ep")), shardings


def of_experts(slots: np.ndarray) -> dict[str, jax.Array]:
    """Arrays of which every number says whose it is, [1, slots, ...]."""
    _, shardings = mover()
    wide = 100.0 * slots[None, :, None, None] + np.arange(8).reshape(1, 1, 4, 2)
    arrays = {"wide": wide, "narrow": 10.0 * slots[None, :, None] + np.arange(3)[None, None, :]}
    return {name: jax.device_put(array.astype(np.float32), shardings[name]) for name, array in arrays.items()}


@settings(max_examples=25)
@given(placements(), placements())
def test_any_placement_becomes_any_other_on_every_rank_in_one_program(old: np.ndarray, new: np.ndarray) -> None:
    program, _ = mover()
    before, moves = of_experts(old), plan_moves(old, new, RANKS)
    after, expected = program(before, moves), of_experts(new)
    for name, array in after.items():
        assert before[name].is_deleted()
        for found, right in zip(array.addressable_shards, expected[name].addressable_shards, strict=True):
            np.testing.assert_array_equal(np.asarray(found.data), np.asarray(right.data))
    assert program._cache_size() == 1
    # No more is sent than what no rank has already, and rounds are those of the fullest pair.
    held = [set(rank) for rank in old.reshape(RANKS, SLOTS)]
    assert moves.sent.sum() == sum(new[slot] not in held[slot // SLOTS] for slot in range(len(new)))
    assert moves.rounds == moves.pieces.sizes.sum(axis=1).max()


def test_copies_are_fetched_from_all_ranks_that_have_them() -> None:
    old = np.array([0, 1, 2, 0, 3, 4, 5, 6, 1, 5, 6, 2])
    new = np.array([0, 1, 2, 0, 3, 4, 5, 6, 0, 0, 1, 2])
    moves = plan_moves(old, new, RANKS)
    assert moves.sent.tolist() == [1, 1, 1, 0] and moves.rounds == 1


def a_larger_layer(slots: int) -> tuple[dict[str, Any], int]:
    """Shapes of the same two arrays, and the bytes of a slot on a rank."""
    wide, narrow = (1, slots, 256, 64), (1, slots, 1024)
    shapes = {"wide": jax.ShapeDtypeStruct(wide, np.float32), "narrow": jax.ShapeDtypeStruct(narrow, np.float32)}
    return shapes, (256 // 2 * 64 + 1024) * 4


def test_a_layer_is_donated_and_beside_it_there_is_one_copy_and_what_comes_in_a_round() -> None:
    slots = np.tile(np.arange(24), 2)
    shapes, slot_bytes = a_larger_layer(len(slots))
    memory = mover()[0].lower(shapes, plan_moves(slots, slots, RANKS)).compile().memory_analysis()
    assert memory.alias_size_in_bytes == 12 * slot_bytes
    # XLA:CPU fills the exchange up: a slot for each rank and one from each.
    assert memory.temp_size_in_bytes <= (12 + 2 * RANKS) * slot_bytes + 4096


def test_accelerators_move_slots_by_their_own_ragged_exchange() -> None:
    slots = np.tile(np.arange(6), 2)
    traced = mover()[0].trace(a_larger_layer(len(slots))[0], plan_moves(slots, slots, RANKS))
    lowered = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert lowered.count("@ragged_all_to_all") == 2 and "stablehlo.all_to_all" not in lowered


# A model

PLAN: dict[str, Any] = {"expert_slots": 12, "moe_dispatch": "all_to_all", "rebalance_every": 2}


def serving() -> Runner:
    """A model on four ranks; where its experts lie depends on the tests before."""
    return oracle_runner("qwen3_moe", "ep=4", page_size=64, **PLAN)


def skewed(layers: int, experts: int) -> np.ndarray:
    """In each layer other experts are hot, so that whatever the placement was, this asks for another one."""
    return np.stack([np.roll(1000.0 / (1 + np.arange(experts)) ** 2, 3 * layer + 5) for layer in range(layers)])


def assert_lies_as_said(runner: Runner, reference: Runner) -> None:
    """Every slot of every rank has the weights of its expert, as a model has them that holds each once, in order."""
    assert runner.balancer is not None
    for layer, slots in enumerate(runner.balancer.slots):
        for name in EXPERT_ARRAYS:
            if (full := f"slots.{layer}.ffn.{name}") in runner.weights:
                expected = np.asarray(reference.weights[full])[:, slots]
                for shard in runner.weights[full].addressable_shards:
                    np.testing.assert_array_equal(np.asarray(shard.data), expected[shard.index])


def test_moving_experts_in_the_middle_of_a_generation_changes_no_token_and_weights_lie_as_if_loaded_so() -> None:
    oracle, runner = load_oracle("qwen3_moe"), serving()
    assert runner.balancer is not None
    session = open_session(runner, oracle.prompts, len(oracle.greedy[0]))
    tokens: list[list[int]] = [[] for _ in oracle.prompts]
    for chunk in session.prefill():
        for request, token in chunk.decoded.tokens.items():
            tokens[request].append(token)
    moved = len(runner.balancer.moved)
    for step in range(len(oracle.greedy[0]) - 1):
        # On top of the layers that move by themselves.
        if step == 2:
            runner.rebalance(skewed(2, 8))
        if step == 3:
            runner.rebalance(skewed(2, 8)[:, ::-1])
        (decoded,) = session.decode({request: row[-1] for request, row in enumerate(tokens)})
        for request, token in decoded.tokens.items():
            tokens[request].append(token)
    assert tokens == oracle.greedy
    assert len(runner.balancer.moved) >= moved + 2
    assert runner.programs.step("decode", False, False, 0)._cache_size() == 1, "no step compiled again"
    assert_lies_as_said(runner, jaxpar.load(ROOT / "qwen3_moe", "ep=4"))


def test_the_fullest_rank_gets_less_to_do_and_a_second_time_nothing_moves_or_compiles() -> None:
    runner, loads = serving(), skewed(2, 8)
    balancer = runner.balancer
    assert balancer is not None
    runner.rebalance(loads[:, ::-1])
    compiled = balancer._relocate._cache_size()
    done = runner.rebalance(loads)
    for layer, row in enumerate(done):
        assert row.after < row.before and row.slots > 0
        assert row.after == pytest.approx(over_mean(device_loads(loads, balancer.slots, 4)).max(axis=1)[layer])
        assert row.after == pytest.approx(over_mean(place(loads, 12, 4).device_loads).max(axis=1)[layer])
    again = runner.rebalance(loads)
    assert [(row.slots, row.sent_bytes) for row in again] == [(0, (0, 0, 0, 0))] * 2
    assert [row.before for row in again] == pytest.approx([row.after for row in done])
    assert balancer._relocate._cache_size() == compiled == 1


def test_bytes_that_are_said_to_be_sent_are_the_slots_of_a_rank_times_what_the_program_sends_for_one() -> None:
    runner = serving()
    balancer = runner.balancer
    assert balancer is not None
    runner.rebalance(skewed(2, 8)[:, ::-1])
    old = balancer.slots
    rows = runner.rebalance(skewed(2, 8))
    for layer, row in enumerate(rows):
        moves = plan_moves(old[layer], balancer.slots[layer], 4)
        arrays = {name: runner.weights[f"slots.{layer}.ffn.{name}"] for name in ("gate_up", "down")}
        program, sizes = jax.make_jaxpr(balancer._relocate)(arrays, moves), runner.plan.mesh.sizes
        traced = trace_traffic(program, sizes)
        assert uniform_control_violations(program, sizes) == []
        assert [(t.sublayer, t.collective, t.axes, t.calls, t.per) for t in traced] == [
            ("moe_rebalance", "ragged_all_to_all", ("ep",), 1, "rounds")
        ] * 2
        # In a round a rank may send any of its slots.
        of_a_slot = sum(t.message_bytes for t in traced) // 3
        assert row.sent_bytes == tuple(of_a_slot * moves.sent) and sum(row.sent_bytes) > 0


def test_loads_of_the_latest_steps_are_what_counts_unless_others_are_given() -> None:
    fields = {"expert_slots": 8, "experts_over": "ep", "page_size": 5}
    runner = jaxpar.load(ROOT / "qwen3_moe", "ep=2", **fields)
    with pytest.raises(PlanError, match=r"^no step has counted loads yet: generate first, or give loads$"):
        runner.rebalance()
    with pytest.raises(PlanError, match="loads are of 2 layers and 6 experts, and the model has 2 layers with 8 expe"):
        runner.rebalance(np.ones((2, 6)))
    assert [row.slots for row in runner.rebalance(np.ones((2, 8)))] == [0, 0]
