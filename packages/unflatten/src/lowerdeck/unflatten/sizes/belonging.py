"""How sizes follow from each other, as those did that a program was recorded with.

What code computes of sizes that belong together leaves no condition in the program: that half of a
size is less than it, say, or that its double is even.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]

from lowerdeck.unflatten._torch_private import SIZE_FUNCTIONS, bounds_of_size
from lowerdeck.unflatten.sizes.one_symbol import made_of_symbol
from lowerdeck.unflatten.sizes.solving import SizeSolver, is_made_of_sizes, is_small, text_of

NO_BOUND = 2**60
"""Numbers from here on are none of a model's sizes."""


def belonging(sizes: Sequence[Any], bounds: Mapping[sympy.Symbol, Sequence[Any]]) -> Iterator[str]:
    """Yield the conditions that sizes meet because of what they are computed of.

    Args:
        sizes: The expression of each; ``{0}`` stands for the first in what is yielded.
        bounds: The smallest and the largest number that a symbol may be, or None.
    """
    first: dict[Any, str] = {}
    compound: list[tuple[str, Any]] = []
    for at, size in enumerate(sizes):
        slot = f"{{{at}}}"
        if size in first:
            yield f"{slot} == {first[size]}"
        elif size.is_Symbol:
            first[size] = slot
        else:
            compound.append((slot, size))
    # Those first of which others are made: t - 1 tells t, of which (t - 1) // 2 is made.
    for slot, size in sorted(compound, key=lambda each: each[1].count_ops()):
        text = first.get(size) or _Told(first).text(size)
        if text is not None:
            yield f"{slot} == {text}"
        else:
            first[size] = slot
    untold = [size for size in first if not size.is_Symbol]
    if not untold:
        return
    told = _Told(first)
    for symbol, step in told.solver.steps.items():
        parts = [text_of(part, told.solver, told.texts) for part in step]
        if None not in parts:
            if symbol.is_nonnegative:
                yield f"{parts[0]} >= 0"
            if parts[1] != "1":
                yield f"{parts[0]} % {parts[1]} == 0"
    for size in untold:
        slot = first[size]
        # Two of which neither tells the other may do so together with a third.
        others = _Told({one: slot for one, slot in first.items() if one is not size})
        text = others.text(size)
        if text is not None:
            yield f"{slot} == {text}"
        elif is_small(size):
            made = made_of_symbol(size)
            if made is None:
                yield from _between(size, slot, bounds)
                yield from _of_told_parts(size, slot, others)
            elif size.free_symbols.isdisjoint(told.solver.steps):
                yield f"is_made({made!r}, {slot})"


class _Told:
    """What some sizes tell of others.

    Attributes:
        solver: Knows the sizes.
        texts: The text of each.
    """

    def __init__(self, known: Mapping[Any, str]) -> None:
        self.solver = SizeSolver([*known], converts=True)
        self.texts = [*known.values()]

    def text(self, size: Any) -> str | None:
        """Return the text of a size as it follows; None if it does not."""
        found = self.solver.find(size)
        return None if found is None else text_of(found, self.solver, self.texts)


def _between(size: Any, slot: str, bounds: Mapping[sympy.Symbol, Sequence[Any]]) -> Iterator[str]:
    """Yield between which numbers a size is, as those are of which it is made.

    A branch that all of them take leaves no condition: ``t % 4 < 4``, or ``b*t <= 512``.
    """
    low, high = bounds_of_size(size, bounds)
    if low is not None and 1 < low < NO_BOUND:
        yield f"{slot} >= {low}"
    if high is not None and high < NO_BOUND:
        yield f"{slot} <= {high}"


def _of_told_parts(size: Any, slot: str, others: _Told) -> Iterator[str]:
    """Yield what its told parts say of a size: ``b*t`` is a multiple of ``b``."""
    if isinstance(size, (SIZE_FUNCTIONS.Max, SIZE_FUNCTIONS.Min)):
        sign = ">=" if isinstance(size, SIZE_FUNCTIONS.Max) else "<="
        texts = map(others.text, size.args)
        yield from (f"{slot} {sign} {text}" for text in texts if text is not None)
        return
    made = others.solver.partly(size)
    untold = others.solver.unsolved(made)
    rest, varying = sympy.expand(made).as_independent(*untold, as_Add=True)
    factor, times = sympy.gcd_terms(varying).as_independent(*untold, as_Add=False)
    if factor.could_extract_minus_sign():
        factor, times = -factor, -times
    if not (is_made_of_sizes(rest) and is_made_of_sizes(factor)):
        return
    rest_text, by = (text_of(part, others.solver, others.texts) for part in (rest, factor))
    above = slot if rest == 0 else f"({slot} - {rest_text})"
    if factor != 1:
        yield f"{above} % {by} == 0"
    if rest != 0 and times.is_nonnegative and not factor.atoms(sympy.Add):
        yield f"{above} >= 0"
