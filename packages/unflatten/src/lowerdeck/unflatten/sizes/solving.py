"""How sizes follow from the sizes of a call's arguments, where they do exactly."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
from sympy.core.function import Application  # type: ignore[import-untyped]

from lowerdeck.unflatten._torch_private import SIZE_FUNCTIONS

_FUNCTIONS = frozenset({"FloorDiv", "CleanDiv", "Mod", "PythonMod", "Max", "Min"})
_SIGNS = {
    "Add": " + ",
    "Mul": " * ",
    "Pow": " ** ",
    "FloorDiv": " // ",
    "CleanDiv": " // ",
    "Mod": " % ",
    "PythonMod": " % ",
}
_CHOICES = {"Max": ">", "Min": "<"}
_CONVERSIONS = {
    "ToFloat": " * 1.0",
    "TruncToInt": ".__trunc__()",
    "RoundToInt": ".__round__()",
    "FloorToInt": ".__floor__()",
    "CeilToInt": ".__ceil__()",
}
"""Written behind what is converted: the code around a text may have an ``int`` of its own."""

_QUOTIENTS = {"IntTrueDiv": " / ", "FloatTrueDiv": " / "}
_PASSES = 4
_HIGHEST_DEGREE = 64
_MOST_TERMS = 64
_MOST_FUNCTIONS = 16
_LARGEST_NUMBER = 2**63
"""Sizes of a file may be any expression, and to take one apart may be without end. No model's has
a higher power, a larger number, more terms once its products are written out, or more functions
within each other."""
_MOST_RELATIONS = 16


class SizeSolver:
    """Tells how expressions follow from others.

    Args:
        known: The expressions, such as the sizes of a call's arguments.
        converts: Whether what it finds may compute with numbers that are no whole ones.

    Attributes:
        places: The symbol that stands for each of ``known`` in what ``find`` returns, and its
            place there.
        steps: How symbols follow that none of these is: a numerator, and what divides it exactly.
    """

    def __init__(self, known: Sequence[Any], *, converts: bool = False) -> None:
        self._converts = converts
        self.places: dict[Any, int] = {}
        self.steps: dict[Any, tuple[Any, Any]] = {}
        self._known: dict[Any, Any] = {}
        self._relations: list[tuple[Any, Any]] = []
        self._found: dict[Any, Any] = {}
        for place, expression in enumerate(map(_as_exported, known)):
            if expression not in self._known:
                stands = sympy.Dummy(f"given_{place}", integer=True)
                self._known[expression] = stands
                self.places[stands] = place
        self._direct = {one: made for one, made in self._known.items() if one.is_Symbol}
        self._compound = {
            one: made for one, made in self._known.items() if not one.is_Symbol and is_small(one)
        }
        self._solve()

    def find(self, wanted: Any) -> Any:
        """Return ``wanted`` in ``places`` and in the symbols of ``steps``; None if it is not told.

        Args:
            wanted: An expression.
        """
        if wanted not in self._found:
            self._found[wanted] = self._search(_as_exported(wanted))
        return self._found[wanted]

    def places_in(self, found: Any) -> set[int]:
        """Return the places of what is read for something that ``find`` returned."""
        places: set[int] = set()
        seen: set[Any] = set()
        left = [found]
        while left:
            symbols = left.pop().free_symbols - seen
            seen |= symbols
            places.update(self.places[one] for one in symbols if one in self.places)
            left += [part for one in symbols for part in self.steps.get(one, ())]
        return places

    def partly(self, wanted: Any) -> Any:
        """Return ``wanted`` with ``places`` for the parts of it that are known."""
        # Largest first. A part may be there as it is, or times a number.
        parts = sorted(self._compound.items(), key=lambda part: -part[0].count_ops())
        made = self._with_parts(_as_exported(wanted))
        return made.subs(parts).xreplace(self._direct)

    def _with_parts(self, wanted: Any) -> Any:
        for part, stands in self._compound.items():
            wanted = _with_part(wanted, part, stands)
        return wanted

    def _search(self, wanted: Any) -> Any:
        if wanted in self._known:
            return self._known[wanted]
        if not is_small(wanted):
            return None
        for candidate in self._candidates(wanted):
            found = _divided(candidate) if wanted.is_integer else candidate
            if not self.unsolved(found) and is_made_of_sizes(found, self._converts):
                return found
        return None

    def _candidates(self, wanted: Any) -> Iterator[Any]:
        yield wanted.xreplace(self._direct)
        unsolved = self.unsolved(wanted)
        if all(unsolved.isdisjoint(one.free_symbols) for one in self._compound):
            return
        yield self.partly(wanted)
        wanted = self._with_parts(wanted)
        for term, stands in self._relations:
            wanted = sympy.expand(wanted.xreplace({term: stands}))
        yield wanted.xreplace(self._direct)

    def unsolved(self, expression: Any) -> set[Any]:
        """Return the symbols in an expression that nothing known tells."""
        return {
            symbol
            for symbol in expression.free_symbols
            if symbol not in self.steps and symbol not in self.places and symbol not in self._known
        }

    def _solve(self) -> None:
        for _ in range(_PASSES):
            before = len(self.steps)
            for one, stands in self._compound.items():
                unsolved = self.unsolved(one)
                if len(unsolved) == 1:
                    self._note_step(unsolved.pop(), one, stands)
            if len(self.steps) == before:
                break
        for one, stands in list(self._compound.items())[:_MOST_RELATIONS]:
            self._note_relation(one, stands)

    def _note_step(self, symbol: Any, whole: Any, stands: Any) -> None:
        parts = _linear(whole, symbol)
        if parts is None:
            return
        times, rest = (part.xreplace(self._direct) for part in parts)
        numerator = stands - rest
        if times.could_extract_minus_sign():
            times, numerator = -times, -numerator
        if is_made_of_sizes(times) and is_made_of_sizes(numerator):
            self.steps[symbol] = (numerator, times)

    def _note_relation(self, whole: Any, stands: Any) -> None:
        for term, other in self._relations:
            whole = sympy.expand(whole.xreplace({term: other}))
        unsolved = self.unsolved(whole)
        for term in _terms(whole, unsolved):
            parts = _linear(whole, term)
            if parts is not None:
                self._relations.append((term, (stands - parts[1]) / parts[0]))
                return


def _as_exported(expression: Any) -> Any:
    """Return an expression as export makes it: that of a file has sympy's own functions."""
    if is_small(expression) and expression.has(sympy.Max, sympy.Min):
        of_export = {sympy.Max: SIZE_FUNCTIONS.Max, sympy.Min: SIZE_FUNCTIONS.Min}
        for function, made in of_export.items():
            expression = expression.replace(function, made)
    return expression


def _with_part(wanted: Any, part: Any, stands: Any) -> Any:
    """Return ``wanted`` with what is computed of a function's result: export joins the two.

    A quarter is half of the half, and the largest of three that of one and the largest of two.
    """
    name = type(part).__name__
    if name in _CHOICES:
        inner = set(part.args)
        for whole in wanted.atoms(type(part)):
            if inner < set(whole.args):
                rest = set(whole.args) - inner
                wanted = wanted.xreplace({whole: type(part)(stands, *rest)})
    elif name == "FloorDiv":
        for whole in wanted.atoms(type(part)):
            times = _quotient(part.args, whole.args)
            if times is not None:
                wanted = wanted.xreplace({whole: type(part)(stands, times)})
    return wanted


def _quotient(one: Sequence[Any], other: Sequence[Any]) -> Any:
    """Return how often the second of two fractions goes into the first; None if not so often."""
    (factor, base), (other_factor, other_base) = (
        sympy.expand(numerator).as_content_primitive() for numerator, _ in (one, other)
    )
    times = sympy.expand(factor * other[1] / (other_factor * one[1]))
    is_whole = base == other_base and times.as_numer_denom()[1] == 1
    return times if is_whole and not times.could_extract_minus_sign() and times != 1 else None


def _divided(found: Any) -> Any:
    """Return a whole number as one that is divided exactly, where parts of it are fractions."""
    if not (found.is_Add or found.is_Mul) or not is_small(found):
        return found
    numerator, divisor = found.as_numer_denom()
    if not divisor.is_Integer or divisor == 1:
        return found
    return SIZE_FUNCTIONS.CleanDiv(numerator, divisor)


def _terms(whole: Any, unsolved: Iterable[Any]) -> Iterator[Any]:
    """Yield what may stand alone on one side of an equation: symbols, and what is nonlinear."""
    symbols = sorted(unsolved, key=str)
    yield from symbols
    nonlinear = whole.atoms(Application, sympy.Pow)
    yield from sorted(
        (term for term in nonlinear if not term.free_symbols.isdisjoint(symbols)), key=str
    )


def _linear(whole: Any, term: Any) -> tuple[Any, Any] | None:
    """Return ``a`` and ``b`` where ``whole`` is ``a*term + b``; None if it is not."""
    stands = sympy.Dummy("term", integer=True)
    named = sympy.expand(whole.xreplace({term: stands}))
    times = named.coeff(stands, 1)
    rest = sympy.expand(named - times * stands)
    if times == 0 or times.has(stands) or rest.has(stands) or rest.has(term) or times.has(term):
        return None
    return times, rest


def is_made_of_sizes(expression: Any, converts: bool = False) -> bool:
    """Return whether whole numbers make ``expression``, with functions that are known.

    Args:
        expression: It.
        converts: Whether other numbers may, too.
    """
    return is_small(expression) and _are_known(expression, converts)


def is_small(expression: Any) -> bool:
    """Return whether an expression is none of those that take for ever."""
    return (
        _degree(expression) <= _HIGHEST_DEGREE
        and _terms_in(expression) <= _MOST_TERMS
        and _depth(expression) <= _MOST_FUNCTIONS
    )


def _degree(expression: Any) -> float:
    """Return how large ``expression`` may become at most, as a power of its symbols."""
    if expression.is_Pow:
        return float(_times(expression)) * _degree(expression.base)
    degrees = map(_degree, expression.args)
    return sum(degrees) if expression.is_Mul else max(degrees, default=int(expression.is_Symbol))


def _terms_in(expression: Any) -> float:
    """Return of how many terms ``expression`` is the sum at most, and each function's argument."""
    terms = [_terms_in(part) for part in expression.args]
    if expression.is_Add:
        return sum(terms)
    if expression.is_Mul:
        return math.prod(terms)
    if expression.is_Pow:
        base = terms[0]
        times = _times(expression)
        is_few = base <= _MOST_TERMS and times <= _HIGHEST_DEGREE
        return 1 if base == 1 else math.comb(times + base - 1, times) if is_few else math.inf
    return max(terms, default=1)


def _depth(expression: Any) -> int:
    """Return how many functions are within each other."""
    return int(isinstance(expression, Application)) + max(map(_depth, expression.args), default=0)


def _times(power: Any) -> Any:
    exponent = power.exp
    if exponent.is_Integer:
        return max(int(exponent), 1)
    return 1 if exponent.is_number else math.inf


def _are_known(expression: Any, converts: bool) -> bool:
    if expression.is_Symbol or (converts and expression.is_Float):
        return True
    if expression.is_Integer:
        return bool(abs(expression) <= _LARGEST_NUMBER)
    if expression.is_Pow and not (expression.exp.is_Integer and expression.exp > 0):
        return False
    known = _FUNCTIONS.union(_CONVERSIONS, _QUOTIENTS) if converts else _FUNCTIONS
    is_known = expression.is_Add or expression.is_Mul or expression.is_Pow
    if not is_known and type(expression).__name__ not in known:
        return False
    return all(_are_known(part, converts) for part in expression.args)


def ordered(expression: Any) -> list[Any]:
    """Return the operands of an expression: of a sum first what is added, then what is taken."""
    if not expression.is_Add:
        return list(expression.args)
    return sorted(expression.args, key=lambda part: (is_taken(part), part.is_Integer, str(part)))


def is_taken(part: Any) -> bool:
    """Return whether a part of a sum is a negative multiple."""
    return bool(part.could_extract_minus_sign())


def text_of(whole: Any, solver: SizeSolver, texts: Sequence[str]) -> str | None:
    """Return the text of what a solver found, where ``texts`` are those of what it knows."""
    if whole.is_Integer:
        return f"({int(whole)})" if whole < 0 else str(int(whole))
    if whole.is_Float:
        return f"({float(whole)!r})"
    if whole in solver.places:
        return texts[solver.places[whole]]
    step = solver.steps.get(whole)
    parts = [text_of(part, solver, texts) for part in (whole.args if step is None else step)]
    known = [part for part in parts if part is not None]
    name = type(whole).__name__ if step is None else "CleanDiv"
    if not known or len(known) < len(parts):
        return None
    if step is not None and known[1] == "1":
        return known[0]
    if name in _CHOICES:
        made = known[0]
        for part in known[1:]:
            made = f"({made} if {made} {_CHOICES[name]} {part} else {part})"
        return made
    if name in _CONVERSIONS:
        return f"({known[0]}{_CONVERSIONS[name]})"
    sign = _SIGNS.get(name) or _QUOTIENTS.get(name)
    return f"({sign.join(known)})" if sign else None
