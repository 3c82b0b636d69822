"""Layouts: every token on exactly one rank, how many a rank can get, and what causal attention costs each."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import error_of

from jaxpar.errors import PlanError
from jaxpar.layout import LAYOUTS, causal_work, deal, local_length, owner
from jaxpar.layout_picture import ANOTHER_STEP, UNSEEN, ring_steps

layouts, ranks, interleaves = st.sampled_from(LAYOUTS), st.integers(1, 9), st.integers(1, 17)
firsts, counts = st.integers(0, 300), st.integers(0, 100)
windows = st.none() | st.integers(1, 100)


def lengths(layout: str, count: int, ranks: int, interleave: int = 1) -> list[int]:
    return [len(held) for held in deal(layout, 0, count, ranks, interleave)]


def rank_work(layout: str, count: int, ranks: int) -> list[int]:
    return causal_work(deal(layout, 0, count, ranks)).sum(axis=1).tolist()


def balance(layout: str, count: int, ranks: int) -> float:
    """The slowest rank's work against the mean."""
    work = rank_work(layout, count, ranks)
    return max(work) * ranks / sum(work)


# Who holds what


@given(layouts, firsts, counts, ranks, interleaves)
def test_every_token_is_on_exactly_one_rank_in_ascending_order(
    layout: str, first: int, count: int, ranks: int, interleave: int
) -> None:
    dealt = deal(layout, first, count, ranks, interleave)
    assert len(dealt) == ranks
    assert sorted(np.concatenate(dealt).tolist()) == list(range(count))
    assert all((np.diff(held) > 0).all() for held in dealt)


@given(layouts, firsts, counts, ranks, interleaves)
def test_tokens_come_back_exactly_from_padded_ranks(
    layout: str, first: int, count: int, ranks: int, interleave: int
) -> None:
    tokens = np.random.default_rng(count).integers(0, 1000, count)
    width = local_length(layout, count, ranks, interleave)
    padded = np.full((ranks, width), -1)
    dealt = deal(layout, first, count, ranks, interleave)
    for rank, held in enumerate(dealt):
        padded[rank, : len(held)] = tokens[held]
    back = np.full(count, -1)
    for rank, held in enumerate(dealt):
        back[held] = padded[rank, : len(held)]
    np.testing.assert_array_equal(back, tokens)


@given(layouts, firsts, counts, counts, ranks, interleaves)
def test_no_rank_holds_more_than_the_local_length_wherever_a_chunk_begins(
    layout: str, first: int, most: int, count: int, ranks: int, interleave: int
) -> None:
    dealt = deal(layout, first, min(count, most), ranks, interleave)
    assert max(map(len, dealt)) <= local_length(layout, most, ranks, interleave)


@given(layouts, counts, ranks, interleaves)
def test_a_rank_holds_as_much_as_the_local_length_somewhere(
    layout: str, count: int, ranks: int, interleave: int
) -> None:
    starts = range(ranks * interleave)
    most = max(len(held) for first in starts for held in deal(layout, first, count, ranks, interleave))
    assert most == local_length(layout, count, ranks, interleave)


@given(firsts, counts, ranks, interleaves)
def test_striped_puts_a_position_where_it_would_be_decoded_whichever_chunk_it_comes_in(
    first: int, count: int, ranks: int, interleave: int
) -> None:
    for rank, held in enumerate(deal("striped", first, count, ranks, interleave)):
        assert [(first + i) // interleave % ranks for i in held.tolist()] == [rank] * len(held)
        assert (owner(first + held, ranks, interleave) == rank).all()


@given(st.sampled_from(["contiguous", "zigzag"]), firsts, counts, ranks, interleaves)
def test_the_other_layouts_depend_neither_on_the_first_position_nor_on_stripes(
    layout: str, first: int, count: int, ranks: int, interleave: int
) -> None:
    for held, same in zip(deal(layout, first, count, ranks, interleave), deal(layout, 0, count, ranks), strict=True):
        np.testing.assert_array_equal(held, same)


@given(st.sampled_from(["contiguous", "striped"]), counts, ranks)
def test_ranks_differ_by_one_token_at_most_where_stripes_are_one_wide(layout: str, count: int, ranks: int) -> None:
    held = lengths(layout, count, ranks)
    assert sorted(held, reverse=True) == held
    assert held[0] - held[-1] <= 1


@given(counts, ranks)
def test_zigzag_ranks_differ_by_two_tokens_at_most(count: int, ranks: int) -> None:
    held = lengths("zigzag", count, ranks)
    assert max(held) - min(held) <= 2


def test_the_pictures_of_the_module() -> None:
    drawn = {
        "contiguous": [[0, 1, 2, 3], [4, 5, 6, 7]],
        "zigzag": [[0, 1, 6, 7], [2, 3, 4, 5]],
        "striped": [[0, 2, 4, 6], [1, 3, 5, 7]],
    }
    assert set(drawn) == set(LAYOUTS)
    for layout, held in drawn.items():
        assert [tokens.tolist() for tokens in deal(layout, 0, 8, 2)] == held


def test_zigzag_pairs_the_first_block_with_the_last() -> None:
    assert [held.tolist() for held in deal("zigzag", 0, 8, 4)] == [[0, 7], [1, 6], [2, 5], [3, 4]]


def test_zigzag_of_19_tokens_over_4_ranks_has_three_longer_blocks() -> None:
    dealt = [held.tolist() for held in deal("zigzag", 0, 19, 4)]
    # Blocks of 3, 3, 3, 2, 2, 2, 2, 2.
    assert dealt == [[0, 1, 2, 17, 18], [3, 4, 5, 15, 16], [6, 7, 8, 13, 14], [9, 10, 11, 12]]


def test_packed_requests_are_dealt_each_on_its_own() -> None:
    packed = [[held.tolist() for held in deal("zigzag", 0, count, 2)] for count in (8, 4)]
    assert [by_rank[0] for by_rank in packed] == [[0, 1, 6, 7], [0, 3]]
    assert [by_rank[1] for by_rank in packed] == [[2, 3, 4, 5], [1, 2]]


@pytest.mark.parametrize(
    ("count", "ranks", "interleave", "held"),
    [
        (10, 4, 1, [3, 3, 2, 2]),
        (10, 4, 2, [4, 2, 2, 2]),
        (3, 4, 1, [1, 1, 1, 0]),
        (130, 2, 64, [66, 64]),
        (17, 4, 4, [5, 4, 4, 4]),
    ],
)
def test_the_tokens_of_striped_ranks(count: int, ranks: int, interleave: int, held: list[int]) -> None:
    assert lengths("striped", count, ranks, interleave) == held
    assert local_length("striped", count, ranks, interleave) == held[0]


def test_a_layout_that_is_none_is_refused() -> None:
    assert error_of(lambda: deal("diagonal", 0, 8, 2), PlanError) == (
        "layout='diagonal' is not a layout: use contiguous, zigzag, striped"
    )


# What it costs


@given(layouts, st.integers(0, 40), ranks, interleaves, windows)
def test_causal_work_is_the_count_of_pairs_at_every_rank_and_ring_step(
    layout: str, count: int, ranks: int, interleave: int, window: int | None
) -> None:
    held = deal(layout, 0, count, ranks, interleave)
    by_hand = np.zeros((ranks, ranks), np.int64)
    for rank, queries in enumerate(held):
        for step in range(ranks):
            distances = queries[:, None] - held[(rank - step) % ranks]
            by_hand[rank, step] = ((distances >= 0) & (distances < (window or count))).sum()
    np.testing.assert_array_equal(causal_work(held, window), by_hand)


@given(layouts, counts, ranks, interleaves, st.integers(1, 100))
def test_all_ranks_together_do_each_pair_once(
    layout: str, count: int, ranks: int, interleave: int, window: int
) -> None:
    held = deal(layout, 0, count, ranks, interleave)
    assert causal_work(held).sum() == count * (count + 1) // 2
    assert causal_work(held, window).sum() == sum(min(position + 1, window) for position in range(count))


@given(layouts, st.integers(1, 40), st.integers(1, 5), interleaves, windows)
def test_a_picture_has_each_pair_at_one_step_where_causal_work_counts_it(
    layout: str, count: int, ranks: int, interleave: int, window: int | None
) -> None:
    held = deal(layout, 0, count, ranks, interleave)
    steps = ring_steps(held, window)
    seen = np.tril(np.ones((count, count), bool)) & ~np.tril(np.ones((count, count), bool), -(window or count))
    assert ((steps >= 0).sum(axis=0) == seen).all()
    assert ((steps == UNSEEN) == ~seen).all()
    assert ((steps == ANOTHER_STEP) == (seen & (steps < 0))).all()
    drawn = [[(computed == rank).sum() for computed in steps] for rank in range(ranks)]
    np.testing.assert_array_equal(drawn, causal_work(held, window))


def test_the_work_of_32_positions_over_4_ranks() -> None:
    assert rank_work("contiguous", 32, 4) == [36, 100, 164, 228]
    assert rank_work("zigzag", 32, 4) == [132] * 4
    assert rank_work("striped", 32, 4) == [120, 128, 136, 144]
    assert round(balance("contiguous", 32, 4), 3) == 1.727
    assert round(balance("striped", 32, 4), 4) == 1.0909


@given(st.integers(1, 9), st.integers(1, 12))
def test_zigzag_is_even_where_its_blocks_are(ranks: int, block: int) -> None:
    count = 2 * ranks * block
    assert rank_work("zigzag", count, ranks) == [block * (count + 1)] * ranks


@given(st.integers(1, 9), st.integers(1, 24))
def test_the_slowest_rank_against_the_mean_in_closed_form(ranks: int, each: int) -> None:
    count = ranks * each
    assert balance("striped", count, ranks) == pytest.approx(1 + (ranks - 1) / (ranks * each + 1))
    assert balance("contiguous", count, ranks) == pytest.approx(((2 * ranks - 1) * each + 1) / (ranks * each + 1))


def test_stripes_are_all_but_even_on_long_sequences() -> None:
    assert round(balance("striped", 32768, 8), 5) == 1.00021
