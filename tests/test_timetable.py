"""The timetable of a pipeline: who works on what in which tick, how much of it is idle, and how long it takes."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.errors import PlanError
from jaxpar.pipeline.timetable import Timetable, decode_timetable, free_running, lockstep, prefill_timetable

few = st.integers(1, 7)
timetables = st.one_of(
    st.builds(prefill_timetable, st.integers(1, 12), few), st.builds(decode_timetable, few, st.integers(1, 4), few)
)


def shown(timetable: Timetable) -> list[str]:
    """A row for each stage, a character for each tick."""
    return ["".join("." if item < 0 else str(item) for item in row) for row in timetable.slots]


# Who works when


def test_items_of_prefill_enter_one_a_tick_and_go_on_by_a_stage_a_tick() -> None:
    assert shown(prefill_timetable(5, 3)) == ["01234..", ".01234.", "..01234"]


def test_as_many_groups_as_stages_or_more_keep_decode_full() -> None:
    assert shown(decode_timetable(3, 2, 3)) == ["012345..", ".012345.", "..012345"]
    assert shown(decode_timetable(4, 2, 2)) == ["01234567.", ".01234567"]


def test_fewer_groups_than_stages_leave_ticks_of_every_round_idle() -> None:
    assert shown(decode_timetable(2, 3, 4)) == ["01..23..45...", ".01..23..45..", "..01..23..45.", "...01..23..45"]


@given(timetables)
def test_an_item_is_on_every_stage_once_one_after_the_other(timetable: Timetable) -> None:
    for item, entry in enumerate(timetable.entries):
        stages, ticks = np.nonzero(timetable.slots == item)
        assert stages.tolist() == [*range(timetable.stages)]
        assert ticks.tolist() == [entry + stage for stage in range(timetable.stages)]
        assert [timetable.slots[stage, entry + stage] for stage in range(timetable.stages)] == [item] * timetable.stages
    assert timetable.slots[0, 0] == 0
    assert timetable.stages == 1 or timetable.slots[1, 0] == -1
    assert timetable.slots[:, -1].any() or timetable.items == 1, "it ends with the last item"


@given(few, st.integers(1, 4), few)
def test_a_group_s_token_enters_when_its_last_one_has_left(groups: int, rounds: int, stages: int) -> None:
    entries = decode_timetable(groups, rounds, stages).entries
    for before, after in zip(entries, entries[groups:], strict=False):
        assert after >= before + stages
    assert [entry for entry in entries if entry < max(groups, stages)] == [*range(groups)]


# The bubble


@given(timetables)
def test_idle_slots_are_those_without_an_item(timetable: Timetable) -> None:
    assert timetable.idle_slots == (timetable.slots < 0).sum()
    assert timetable.idle_share == Fraction(int((timetable.slots < 0).sum()), timetable.slots.size)


@given(st.integers(1, 100), st.integers(1, 20))
def test_the_bubble_of_prefill_is_p_minus_1_of_m_plus_p_minus_1(m: int, p: int) -> None:
    timetable = prefill_timetable(m, p)
    assert (timetable.idle_slots, timetable.ticks) == (p * (p - 1), m + p - 1)
    assert timetable.idle_share == Fraction(p - 1, m + p - 1)


@pytest.mark.parametrize(("stages", "percent"), [(2, "1.54"), (4, "4.48"), (8, "9.86")])
def test_the_bubble_of_64_items(stages: int, percent: str) -> None:
    assert f"{100 * float(prefill_timetable(64, stages).idle_share):.2f}" == percent


@given(st.integers(1, 9), st.integers(1, 9))
def test_decode_with_one_batch_leaves_all_stages_but_one_idle(rounds: int, stages: int) -> None:
    assert decode_timetable(1, rounds, stages).idle_share == Fraction(stages - 1, stages)


@pytest.mark.parametrize("numbers", [(0, 2), (2, 0)])
def test_nothing_to_do_or_nobody_to_do_it_is_refused(numbers: tuple[int, int]) -> None:
    with pytest.raises(PlanError, match="=0: it must be at least 1"):
        prefill_timetable(*numbers)
    with pytest.raises(PlanError, match="=0: it must be at least 1"):
        decode_timetable(1, *numbers)


# Time


def with_costs(timetable: Timetable, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0.5, 2, (timetable.items, timetable.stages))


@given(timetables)
def test_where_all_cost_the_same_both_schedules_are_the_timetable(timetable: Timetable) -> None:
    ones = np.ones((timetable.items, timetable.stages))
    for schedule in (lockstep(timetable, ones), free_running(timetable, ones)):
        assert schedule.duration == timetable.ticks
        assert schedule.idle_share == pytest.approx(float(timetable.idle_share))
        assert schedule.starts[:, 0].tolist() == [*timetable.entries]


@given(timetables, st.integers(0, 5))
def test_free_running_starts_each_item_at_the_first_moment_it_may_and_is_never_slower(
    timetable: Timetable, seed: int
) -> None:
    costs = with_costs(timetable, seed)
    free, step = free_running(timetable, costs), lockstep(timetable, costs)
    assert free.duration <= step.duration + 1e-12
    ends = free.starts + costs
    for item in range(timetable.items):
        for stage in range(timetable.stages):
            waits_for = [0.0]
            waits_for += [ends[item - 1, stage]] if item else []
            waits_for += [ends[item, stage - 1]] if stage else []
            last = item - timetable.groups
            waits_for += [ends[last, -1]] if timetable.groups and stage == 0 and last >= 0 else []
            assert free.starts[item, stage] == pytest.approx(max(waits_for))


@given(timetables)
def test_a_tick_of_lockstep_lasts_as_long_as_its_slowest_busy_stage(timetable: Timetable) -> None:
    costs = with_costs(timetable)
    step = lockstep(timetable, costs)
    slowest = [
        max(costs[item, stage] for stage in range(timetable.stages) if (item := timetable.slots[stage, tick]) >= 0)
        if (timetable.slots[:, tick] >= 0).any()
        else 0
        for tick in range(timetable.ticks)
    ]
    assert step.duration == pytest.approx(sum(slowest))
    assert step.idle_share == pytest.approx(1 - costs.sum() / (timetable.stages * sum(slowest)))


def test_dearer_and_dearer_items_cost_the_drain_of_the_dearest_in_either_schedule() -> None:
    # Proportionate flow shop: the sum over items, and the dearest once more for each stage but one.
    timetable, costs = prefill_timetable(3, 3), np.tile([[1.0], [2.0], [4.0]], 3)
    assert lockstep(timetable, costs).duration == free_running(timetable, costs).duration == 7 + 2 * 4


def test_an_uneven_stage_is_a_bottleneck_that_free_running_hides_less_work_behind() -> None:
    timetable, costs = prefill_timetable(2, 2), np.array([[1.0, 3.0], [1.0, 3.0]])
    assert lockstep(timetable, costs).duration == free_running(timetable, costs).duration == 1 + 3 + 3
    dear_first = np.array([[1.0, 3.0], [3.0, 1.0]])
    assert (lockstep(timetable, dear_first).duration, free_running(timetable, dear_first).duration) == (5, 5)


def test_parts_of_a_tick_wait_for_the_slowest_each() -> None:
    timetable = prefill_timetable(2, 2)
    one, other = np.array([[5.0, 5.0], [1.0, 1.0]]), np.array([[1.0, 1.0], [5.0, 5.0]])
    assert lockstep(timetable, one + other).duration == 6 * 3
    assert lockstep(timetable, one, other).duration == 6 + 10 + 6
    assert lockstep(timetable, one, other).costs.tolist() == (one + other).tolist()
