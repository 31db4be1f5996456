"""The table of the runtime's kernels: each row means something, and there is no second table."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from lowerdeck.serializer import runtime_kernels
from lowerdeck.serializer.kernels import table
from lowerdeck.serializer.kernels.limits import parse_limit

_PACKAGES = Path(__file__).parents[2]
_WORDS = {
    *("contiguous", "channels_last", "channels_last_alike", "in_place", "first_in_place"),
    *("into_self", "complex", "mixed", "divides"),
}
_LETTERS = set("TWtLVOiIjJnmfgbcBFsr")
# Implementations and laws by kernel, which say more than its name.
_IMPLEMENTS = {f"runner/operators/{name}.py" for name in ("guards", "view_ops", "prim_ops")}


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


def test_nobody_else_lists_kernels() -> None:
    """Strings that name kernels are in the table, and beside what implements them."""
    folders = sorted(_PACKAGES.glob("*/src/lowerdeck"))
    if len(folders) < 2:
        pytest.skip("the tests run from an installed wheel, without the sources")
    known = set(runtime_kernels())
    short = {name.partition("::")[2] for name in known if "." in name}
    found: dict[str, int] = {}
    for folder in folders:
        for module in sorted(folder.rglob("*.py")):
            name = module.relative_to(folder).as_posix()
            if module == Path(table.__file__) or name in _IMPLEMENTS:
                continue
            texts = [
                node.value
                for node in ast.walk(ast.parse(module.read_text()))
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
            ]
            words = {word for text in texts for word in text.split()}
            count = len(words & (known | short))
            if count > 4:
                found[name] = count
    assert not found
