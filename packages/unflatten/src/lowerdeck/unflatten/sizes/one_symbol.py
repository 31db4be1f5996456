"""Sizes that are computed of one symbol: ``(t + 1) // 2`` tells between which numbers ``t`` is."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

from lowerdeck.unflatten.sizes.solving import SizeSolver, text_of

UNTOLD = "n"
"""The symbol in a condition's text, where no size tells its value."""

_LARGEST = 2**40


def for_some(text: str, symbol: sympy.Symbol, sizes: Sequence[Any]) -> Iterator[str]:
    """Yield that a condition holds for some value of a symbol of which a size is computed.

    Args:
        text: The condition.
        symbol: The symbol, of which no size tells the value: half of it, rounded, is one.
        sizes: All sizes.
    """
    for number, size in enumerate(sizes):
        made = made_of_symbol(size)
        if made is not None and size.free_symbols == {symbol}:
            yield f"some({made!r}, {{{number}}}, lambda {UNTOLD}: {text})"
            return


def made_of_symbol(size: Any) -> str | None:
    """Return the text of a size that is computed of one symbol; None of any other.

    Of larger numbers it must not become less, so that the numbers of which it is made are found.
    """
    symbols = list(size.free_symbols)
    if len(symbols) != 1:
        return None
    solver = SizeSolver(symbols, converts=True)
    found = solver.find(size)
    made = None if found is None else text_of(found, solver, [UNTOLD])
    return made if made is not None and _grows(made) else None


def _grows(made: str) -> bool:
    """Return whether what is made of a symbol does not get smaller where that gets larger."""
    sizes = list(map(_made_of(made), range(1, 64)))
    return sizes == sorted(sizes) and sizes[-1] > sizes[0]


@lru_cache(4096)
def _made_of(text: str) -> Callable[[int], int]:
    """Return the function of a symbol that has this text, which is of our making."""
    function: Callable[[int], int] = eval(f"lambda {UNTOLD}: {text}")
    return function


def some(made: str, size: int, holds: Callable[[int], bool]) -> bool:
    """Return whether a condition holds for a symbol of which ``made`` makes a size.

    Where none does, the program has no such size: then it is held to what the next ones are. A
    compiler would follow the search, and tie what it compiles to the size.
    """
    return torch.compiler.is_compiling() or any(map(holds, numbers_of(made, size)))


def is_made(made: str, size: int) -> bool:
    """Return whether ``made`` makes a size of some number; a compiler is not asked, as above."""
    return torch.compiler.is_compiling() or _made_of(made)(numbers_of(made, size)[0]) == size


@lru_cache(4096)
def numbers_of(made: str, size: int) -> tuple[int, int]:
    """Return the smallest and the largest number of which ``made`` makes a size.

    Where none does, these are the one of which it makes more, and the one of which it makes less.
    """
    make, past = _made_of(made), 2
    while make(past) <= size and past < _LARGEST:
        past *= 2
    first = bisect_left(range(past), size, lo=1, key=make)
    last = bisect_right(range(past), size, lo=1, key=make) - 1
    return first, max(last, 1)
