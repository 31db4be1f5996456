"""Rows of two sequences side by side, and data in a page that stay data."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowerdeck.serializer import printable
from lowerdeck.serializer.report.embed import clip, json_for_page, number
from lowerdeck.serializer.report.pairing import pair_rows

ANY_TEXT = st.text(st.characters(codec=None), max_size=50)
FEW_KINDS = st.lists(st.sampled_from("abcd"), max_size=40)


@given(FEW_KINDS, FEW_KINDS)
def test_each_item_is_there_once_in_order_and_only_equals_are_together(
    old: list[str], new: list[str]
) -> None:
    rows = pair_rows(old, new)
    assert [left for left, _ in rows if left >= 0] == list(range(len(old)))
    assert [right for _, right in rows if right >= 0] == list(range(len(new)))
    assert all(old[left] == new[right] for left, right in rows if left >= 0 and right >= 0)


@pytest.mark.parametrize(
    ("old", "new", "pairs", "count"),
    [
        # One inserted item is the only difference.
        ([*"abcdefg" * 700], [*"abcdefg" * 350, "new", *"abcdefg" * 350], 4900, 4901),
        # Items that occur once anchor a large gap.
        (["x", *range(2000), "y"], ["p", *range(0, 2000, 2), "q"], 1000, 2004),
        # A large gap without anchors is given up as a whole.
        (["a", *"xy" * 500, "b"], ["c", *"yx" * 500, "d"], 0, 2004),
    ],
)
def test_long_sequences_are_paired(
    old: list[object], new: list[object], pairs: int, count: int
) -> None:
    rows = pair_rows(old, new)
    assert (sum(-1 not in row for row in rows), len(rows)) == (pairs, count)


@given(ANY_TEXT)
def test_no_text_can_end_its_element_or_begin_another(text: str) -> None:
    shown = json_for_page({"name": text + "</script><!--<script>&lt;", text: 1})
    assert not set(shown) & set("<>&")
    assert shown.isascii()
    assert json.loads(shown)["name"].startswith(text)


@given(st.integers() | st.sampled_from([10**5000, -(10**5000)]))
def test_numbers_stay_exact_where_a_browser_is_exact_and_finite_everywhere(value: int) -> None:
    shown = number(value)
    assert shown == (value if abs(value) <= 2**53 else shown)
    assert abs(shown) <= 2.0**64
    assert json.loads(json_for_page(shown)) == shown
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_for_page([math.inf])


@given(ANY_TEXT, st.integers(2, 60))
def test_a_long_text_keeps_its_ends(text: str, length: int) -> None:
    shown = clip(text, length)
    assert shown.isprintable() or any(c.isspace() for c in shown)
    assert shown.startswith(printable(text[: length // 2]))
    assert shown.endswith(printable(text[-(length // 2) :]))
    # A character takes at most ten as an escape.
    assert len(shown) <= 10 * (length + 3)
