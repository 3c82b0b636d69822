"""Where most rows are padding, `standard` dispatch gathers the real ones: fewer bytes, the same answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle_checks import assert_logits, assert_tokens
from oracle_data import ROOT, load_oracle
from sample_models import open_session, oracle_runner
from test_dispatch import LAYERS, Layer, expected, routed, run

from jaxpar.checkpoint import read_config
from jaxpar.engine.room import padded_to_sum, room_of
from jaxpar.ledger.report import make_ledger
from jaxpar.mesh import MeshSpec
from jaxpar.plan import Phase, Plan
from jaxpar.runner import Runner
from jaxpar.strategies import Step

QWEN = read_config(ROOT / "qwen3_moe")


@pytest.mark.parametrize(
    ("tokens", "padding"),
    [([4, 4, 4, 4], "max"), ([8, 0, 0, 0], "sum"), ([8, 8, 0, 0], "max"), ([8, 7, 0, 0], "sum"), ([1, 0], "max")],
)
def test_ranks_pad_to_the_sum_where_that_sends_less_than_to_the_maximum(tokens: list[int], padding: str) -> None:
    padded = max(tokens) * len(tokens)
    room = padded_to_sum(sum(tokens), padded)
    assert (room > 0) == (padding == "sum")
    if room:
        # An all-reduce of the room sends no more than an all-gather and a reduce-scatter of all rows, half of either.
        assert sum(tokens) <= room <= padded / 2


@given(st.integers(2, 5000))
def test_requests_that_end_one_by_one_meet_few_rooms_that_hold_them(padded: int) -> None:
    rooms = {tokens: padded_to_sum(tokens, padded) for tokens in range(padded)}
    assert all(tokens <= room <= padded / 2 for tokens, room in rooms.items() if room)
    assert len(set(rooms.values())) <= 4


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("padding", [0.0, 0.8, 1.0])
def test_rows_side_by_side_give_the_weighted_sums_of_all_tokens(layer: Layer, padding: float) -> None:
    tokens = routed(layer, 1.0, padding, seed=5)
    real = (tokens.slots < layer.none).any(axis=1)
    found = run(layer, "standard", tokens, room=max(1, int(real.sum())))
    np.testing.assert_allclose(found, expected(tokens, layer.none), rtol=1e-6, atol=1e-6)


def a_step(mesh: str, lanes: int, phase: Any = "decode", tokens: int = 1, **fields: Any) -> Step:
    return Step(QWEN, Plan(MeshSpec.parse(mesh), **({"moe_dispatch": "standard"} | fields)), phase, lanes, tokens, 16)


def test_the_room_is_for_the_fullest_group_of_ranks_that_share_experts() -> None:
    lanes = np.zeros((4 * 8, 1), int)
    lanes[[0, 1, 2, 8], 0] = 1  # of four replicas with eight lanes each three, one and no request
    assert room_of(lanes, a_step("ep=4", 8)) == 4
    assert room_of(lanes, a_step("dp=2,ep=2", 8)) == 8  # the two replicas of dp=0 share experts
    assert room_of(lanes, a_step("dp=2,ep=2", 8, experts_over="dp,ep")) == 4
    apart = np.zeros((4 * 8, 1), int)
    apart[[0, 1, 2, 24, 25, 26], 0] = 1  # three requests in either group, and not on the same place in it
    assert room_of(apart, a_step("dp=2,ep=2", 8)) == 8
    assert room_of(lanes, a_step("dp=4,tp=2", 8, experts_over="tp")) == 4  # each replica has experts of its own
    assert room_of(lanes, a_step("dp=4", 8, experts_over="ep")) == 0
    assert room_of(lanes, a_step("ep=4", 8, moe_dispatch="all_to_all")) == 0
    assert room_of(np.ones_like(lanes), a_step("ep=4", 8)) == 0
    of_cp = np.zeros((2 * 2, 2), int)
    of_cp[0] = 5, 4  # one prompt of nine tokens over two ranks of cp, and three lanes with none
    assert room_of(of_cp, a_step("ep=2,cp=2", 2, "prefill", 8, experts_over="ep,cp")) == 32
    assert room_of(of_cp, a_step("ep=2,cp=2", 2, "prefill", 8)) == 16


@contextmanager
def rooms_of(runner: Runner) -> Iterator[list[int]]:
    """The room of each step that runs."""
    rooms: list[int] = []
    step = runner.programs.step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner.programs, "step", lambda *given: rooms.append(given[3]) or step(*given))
        yield rooms


ON_FOUR_REPLICAS: dict[str, Any] = {"mesh": "ep=4,tp=2", "moe_dispatch": "standard", "page_size": 4}


def test_one_request_on_many_replicas_gets_the_logits_and_tokens_of_transformers() -> None:
    oracle, runner = load_oracle("qwen3_moe"), oracle_runner("qwen3_moe", **ON_FOUR_REPLICAS)
    with rooms_of(runner) as rooms:
        assert_logits(runner, oracle.prompts[:1], oracle.logits[:1])
        assert_tokens(runner, oracle.prompts[:1], oracle.greedy[:1])
    assert rooms
    assert all(rooms)


@pytest.mark.parametrize(("phase", "batch"), [("decode", 1), ("prefill", 1), ("decode", 9)])
def test_the_ledger_counts_the_room_that_a_session_gives(phase: Phase, batch: int) -> None:
    runner = oracle_runner("qwen3_moe", **ON_FOUR_REPLICAS)
    ledger = make_ledger(QWEN, runner.plan, phase, batch, seq=9)
    assert not ledger.differences
    with rooms_of(runner) as rooms:
        running = open_session(runner, [[1] * (8 if phase == "decode" else 9)] * batch, 1)
        for _ in running.prefill():
            pass
        if phase == "decode":
            rooms.clear()
            for _ in running.decode(dict.fromkeys(range(batch), 1)):
                pass
    assert rooms == [part.step.room for part in ledger.steps]
    assert (rooms[0] > 0) == (batch == 1)
