"""Data in a page stays data, whatever it holds."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowerdeck.serializer import printable
from lowerdeck.serializer.report.embed import clip, json_for_page, number

ANY_TEXT = st.text(st.characters(codec=None), max_size=50)


@given(ANY_TEXT)
def test_no_text_can_end_its_element_or_begin_another(text: str) -> None:
    shown = json_for_page({"name": text + "</script><!--<script>&lt;", text: 1})
    assert not set(shown) & set("<>&")
    assert shown.isascii()
    assert json.loads(shown)["name"].startswith(text)


def test_a_number_that_json_cannot_say_is_refused() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_for_page([math.inf])


@given(st.integers())
def test_numbers_stay_exact_where_a_browser_is_exact_and_finite_everywhere(value: int) -> None:
    shown = number(value)
    if abs(value) <= 2**53:
        assert shown == value
    assert json.loads(json_for_page(shown)) == shown


def test_a_number_of_thousands_of_digits_is_cut() -> None:
    assert number(10**5000) == 2.0**64
    assert number(-(10**5000)) == -(2.0**64)


@given(ANY_TEXT, st.integers(2, 60))
def test_a_long_text_keeps_its_ends(text: str, length: int) -> None:
    shown = clip(text, length)
    assert shown.isprintable() or any(c.isspace() for c in shown)
    assert shown.startswith(printable(text[: length // 2]))
    assert shown.endswith(printable(text[-(length // 2) :]))
    # A character takes at most ten as an escape.
    assert len(shown) <= 10 * (length + 3)
