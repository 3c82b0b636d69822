"""How heads are dealt over tp: every head is somewhere, the ratio is kept, copies and padding are as few as can be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.heads import PADDED, split_heads

COUNTS = st.tuples(st.integers(1, 16), st.integers(1, 12), st.integers(1, 16))  # query heads a KV head, KV heads, tp


def ranks(num_q: int, num_kv: int, tp: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(KV heads, query heads) of every rank."""
    heads = split_heads(num_q, num_kv, tp)
    kv, q = heads.kv_local, heads.q_local
    return [(heads.kv_heads[r * kv : r * kv + kv], heads.q_heads[r * q : r * q + q]) for r in range(tp)]


def test_32_query_and_4_kv_heads_at_tp_8_are_4_and_1_a_rank_with_each_kv_head_stored_twice() -> None:
    assert ranks(32, 4, 8) == [((r // 2,), tuple(range(4 * r, 4 * r + 4))) for r in range(8)]


def test_9_query_and_3_kv_heads_pad_the_last_rank_at_tp_2() -> None:
    assert ranks(9, 3, 2) == [((0, 1), (0, 1, 2, 3, 4, 5)), ((2, PADDED), (6, 7, 8, PADDED, PADDED, PADDED))]


def test_9_query_and_3_kv_heads_lie_evenly_at_tp_3() -> None:
    assert ranks(9, 3, 3) == [((0,), (0, 1, 2)), ((1,), (3, 4, 5)), ((2,), (6, 7, 8))]


def test_9_query_and_3_kv_heads_at_tp_4_leave_no_rank_more_than_one_kv_head() -> None:
    assert ranks(9, 3, 4) == [((0,), (0, 1, 2)), ((1,), (3, 4, 5)), ((2,), (6, 7, 8)), ((PADDED,), (PADDED,) * 3)]


def test_8_kv_heads_at_tp_12_are_all_reached() -> None:
    placed = ranks(64, 8, 12)
    assert {head for kv, _ in placed for head in kv} - {PADDED} == set(range(8))
    assert sorted(head for _, q in placed for head in q if head != PADDED) == list(range(64))


def test_28_query_and_7_kv_heads_at_tp_2_keep_four_queries_a_kv_head() -> None:
    heads = split_heads(28, 7, 2)
    assert (heads.kv_local, heads.group) == (4, 4)
    assert heads.kv_heads == (0, 1, 2, 3, 4, 5, 6, PADDED)


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 5, 8, 12])
def test_one_kv_head_is_copied_to_every_rank_that_has_a_query(tp: int) -> None:
    for kv, q in ranks(8, 1, tp):
        assert kv == (0,) or set(q) == {PADDED}


def test_one_rank_holds_the_heads_as_the_checkpoint_does() -> None:
    assert ranks(28, 7, 1) == [(tuple(range(7)), tuple(range(28)))]


@given(COUNTS)
def test_every_query_head_is_on_exactly_one_rank_beside_its_own_kv_head(counts: tuple[int, int, int]) -> None:
    ratio, num_kv, tp = counts
    heads = split_heads(ratio * num_kv, num_kv, tp)
    assert sorted(head for head in heads.q_heads if head != PADDED) == list(range(ratio * num_kv))
    assert set(heads.kv_heads) - {PADDED} == set(range(num_kv))
    for at, head in enumerate(heads.q_heads):
        assert head == PADDED or head // ratio == heads.kv_heads[at // heads.group]


@given(COUNTS)
def test_all_ranks_hold_equally_many_heads_in_the_same_ratio(counts: tuple[int, int, int]) -> None:
    ratio, num_kv, tp = counts
    heads = split_heads(ratio * num_kv, num_kv, tp)
    assert heads.tp == tp
    assert len(heads.kv_heads) == tp * heads.kv_local
    assert len(heads.q_heads) == tp * heads.q_local == len(heads.kv_heads) * heads.group


@given(COUNTS)
def test_no_rank_stores_more_kv_heads_than_an_even_share_rounded_up(counts: tuple[int, int, int]) -> None:
    ratio, num_kv, tp = counts
    assert split_heads(ratio * num_kv, num_kv, tp).kv_local == -(-num_kv // tp)


@given(COUNTS)
def test_padding_is_only_where_heads_do_not_divide(counts: tuple[int, int, int]) -> None:
    ratio, num_kv, tp = counts
    if num_kv % tp == 0 or (tp % num_kv == 0 and ratio % (tp // num_kv) == 0):
        heads = split_heads(ratio * num_kv, num_kv, tp)
        assert PADDED not in heads.q_heads
        assert PADDED not in heads.kv_heads
