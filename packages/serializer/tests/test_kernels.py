"""Each row of the table of the runtime's kernels means something."""

from __future__ import annotations

import re

import pytest

from lowerdeck.serializer import runtime_kernels
from lowerdeck.serializer.kernels import table
from lowerdeck.serializer.kernels.limits import parse_limit

_WORDS = {
    *("contiguous", "channels_last", "channels_last_alike", "in_place", "first_in_place"),
    *("into_self", "complex", "mixed", "divides"),
}
_LETTERS = set("TWtLVOiIjJnmfgbcBFsr")


def test_each_row_has_known_letters_and_words() -> None:
    rows = [row for rows in table._ROWS.values() for row in rows.strip().splitlines()]
    assert len(rows) == len(runtime_kernels()) == 240
    for row in rows:
        _, letters, *words = row.split()
        arguments, arrow, returned = letters.partition(">")
        assert arrow, row
        assert {*arguments, *returned} <= _LETTERS, row
        for word in words:
            positive = re.fullmatch(r"positive\(\d+(,\d+)*\)", word)
            assert word in _WORDS or positive or parse_limit(word) is not None, row


def test_positions_in_a_row_are_arguments_that_it_has() -> None:
    for kernel in runtime_kernels().values():
        assert all(number < len(kernel.arguments) for number in kernel.positive), kernel.name


@pytest.mark.parametrize("word", ["rank(0,1)", "types(2,floating)", "wrapped(1,0)", "shape(1)"])
def test_a_limit_is_written_as_a_word(word: str) -> None:
    assert parse_limit(word) is not None


def test_other_words_are_no_limits() -> None:
    assert parse_limit("contiguous") is None
    assert parse_limit("positive(1)") is None
