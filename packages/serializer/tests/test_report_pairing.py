"""Rows of two sequences side by side."""

from hypothesis import given
from hypothesis import strategies as st

from lowerdeck.serializer.report.pairing import pair_rows

FEW_KINDS = st.lists(st.sampled_from("abcd"), max_size=40)


@given(FEW_KINDS, FEW_KINDS)
def test_each_item_is_there_once_in_order_and_only_equals_are_together(
    old: list[str], new: list[str]
) -> None:
    rows = pair_rows(old, new)
    assert [left for left, _ in rows if left >= 0] == list(range(len(old)))
    assert [right for _, right in rows if right >= 0] == list(range(len(new)))
    assert all(old[left] == new[right] for left, right in rows if left >= 0 and right >= 0)


def test_one_inserted_item_is_the_only_difference() -> None:
    old = [f"op {number % 7}" for number in range(5000)]
    new = [*old[:2500], "new", *old[2500:]]
    assert [row for row in pair_rows(old, new) if -1 in row] == [(-1, 2500)]


def test_items_that_occur_once_anchor_a_large_gap() -> None:
    old = ["x", *(f"op {number}" for number in range(2000)), "y"]
    new = ["p", *(f"op {number}" for number in range(0, 2000, 2)), "q"]
    rows = pair_rows(old, new)
    assert sum(-1 not in row for row in rows) == 1000


def test_a_large_gap_without_anchors_is_given_up_in_whole() -> None:
    rows = pair_rows(["a", *"xy" * 500, "b"], ["c", *"yx" * 500, "d"])
    assert all(-1 in row for row in rows)
    assert len(rows) == 2004
