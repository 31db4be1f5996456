"""Which sizes a program was recorded for, where they vary: bounds, and how they compare.

Export follows one side of each branch of the model's code. The other side is not in the program,
so that sizes for which eager takes it are refused: ``x.shape[1] > 8``, or
``x.shape[0] < x.shape[1]``. These conditions are the whole program's, on its inputs; a module that
is called alone, or after another one was changed, is held to those that its own arguments tell.
"""

from __future__ import annotations

import ast
import math
import re
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

from lowerdeck.torch_base import expression_of, varies
from lowerdeck.unflatten.sizes.belonging import NO_BOUND, belonging
from lowerdeck.unflatten.sizes.one_symbol import UNTOLD, for_some, is_made, some
from lowerdeck.unflatten.sizes.solving import SizeSolver, text_of
from lowerdeck.unflatten.sizes.whole_sides import SIGNS, told_by_wholes

Bounds = tuple[int | None, int | None]
Place = tuple[int, int | None]
"""Number of a leaf, and one of its dimensions; None for a number that is a leaf itself."""

NOT_SURE = (
    "torch's own operators branch on sizes, too, where both sides may compute the same: "
    "check_input_constraints = False runs it all the same."
)

_LONGEST = 2000
"""Conditions of more characters are not read: a model's own have some dozens."""

_HIGHEST_POWER = 8
_CALLS = {
    "max": "max",
    "min": "min",
    "math.trunc": "int",
    "math.floor": "floor",
    "math.ceil": "ceil",
    "torch.sym_float": "float",
    "torch.sym_max": "max",
    "torch.sym_min": "min",
}
_FUNCTIONS = {
    "max": max,
    "min": min,
    "int": int,
    "float": float,
    "floor": math.floor,
    "ceil": math.ceil,
}
"""What conditions call, and what that is here."""

_SOME = re.compile(r"some\('(.+?)', (.+?), lambda n: (.+)\)")
_IS_MADE = re.compile(r"is_made\('(.+?)', (.+?)\)")
_SIZE = re.compile(r"(.*)\.size\(\)\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class SizeGuard:
    """A condition of sizes that held when a program was recorded.

    Attributes:
        text: It as Python, ``{0}`` for the first of ``symbols``.
        symbols: The symbols of the sizes.
    """

    text: str
    symbols: tuple[sympy.Symbol, ...]

    def holds(self, sizes: Sequence[int]) -> bool:
        """Return whether it holds for sizes, one for each symbol."""
        return _holds(self.text, sizes)


@dataclass(frozen=True, slots=True, eq=False)
class SizeLimits:
    """The conditions that the sizes of some leaves must meet.

    Attributes:
        places: The sizes that are looked at.
        texts: The conditions as Python, ``{0}`` for the first of these sizes.
    """

    places: tuple[Place, ...]
    texts: tuple[str, ...]

    @property
    def hold(self) -> Callable[..., bool]:
        """Tells of sizes, one for each place, whether all conditions hold."""
        return _limits_hold(self.texts, len(self.places))

    def hold_for(self, leaves: Sequence[Any]) -> bool:
        """Return whether all conditions hold for leaves of the recorded ranks."""
        return self.hold(*self._sizes(leaves))

    def told(self, leaves: Sequence[Any], names: Sequence[str]) -> str:
        """Return the condition that does not hold, and the sizes, in words.

        Args:
            leaves: The leaves.
            names: How a caller names each.
        """
        sizes = self._sizes(leaves)
        shown = [
            names[leaf] if dim is None else f"{names[leaf]}.shape[{dim}]"
            for leaf, dim in self.places
        ]
        text = next((text for text in self.texts if not _holds(text, sizes)), self.texts[0])
        asked = [place for place in range(len(shown)) if f"{{{place}}}" in text]
        found = ", ".join(f"{shown[place]} = {sizes[place]}" for place in asked)
        text = _SOME.sub(rf"\3, where \2 is \1 for some {UNTOLD}", text)
        text = _IS_MADE.sub(rf"\2 = \1 for some {UNTOLD}", text)
        return f"{text.format(*shown)}; found {found}"

    def _sizes(self, leaves: Sequence[Any]) -> list[Any]:
        return [
            leaves[leaf] if dim is None else leaves[leaf].shape[dim] for leaf, dim in self.places
        ]


@dataclass(slots=True, eq=False)
class SizeGuards:
    """All conditions of a program, and what they say of any sizes in it.

    Attributes:
        all: The conditions.
    """

    all: tuple[SizeGuard, ...] = ()
    _known: dict[object, SizeLimits | None] = field(default_factory=dict, repr=False)

    def limits(self, sizes: Iterable[tuple[Place, Any]]) -> SizeLimits | None:
        """Return the conditions that sizes must meet; None if they are free.

        Args:
            sizes: Each place with the expression that it was recorded as.
        """
        varying = tuple(sizes)
        if varying not in self._known:
            sizes = [size for _, size in varying]
            follow = belonging(sizes, self._bounds())
            texts = dict.fromkeys((*follow, *self._conditions(sizes)))
            self._known[varying] = _limits(varying, list(texts)) if texts else None
        return self._known[varying]

    def _bounds(self) -> dict[sympy.Symbol, list[int | None]]:
        """Return the smallest and the largest number of each symbol that has one of them."""
        found: dict[sympy.Symbol, list[int | None]] = {}
        for guard in self.all:
            bound = _BOUND.fullmatch(guard.text)
            if bound is not None:
                ends = found.setdefault(guard.symbols[0], [None, None])
                ends[bound[1].startswith("<")] = int(bound[2])
        return found

    def _conditions(self, sizes: Sequence[Any]) -> Iterator[str]:
        asked = set().union(*(size.free_symbols for size in sizes))
        guards = [guard for guard in self.all if asked.issuperset(guard.symbols)]
        if not guards:
            return
        solver = SizeSolver(sizes, converts=True)
        slots = [f"{{{number}}}" for number in range(len(sizes))]
        for guard in guards:
            found = [solver.find(symbol) for symbol in guard.symbols]
            parts = [None if one is None else text_of(one, solver, slots) for one in found]
            untold = [
                symbol for symbol, part in zip(guard.symbols, parts, strict=True) if not part
            ]
            text = guard.text.format(*(part or UNTOLD for part in parts))
            whole = told_by_wholes(guard.text, guard.symbols, solver, slots) if untold else text
            if whole is not None:
                yield whole
            elif len(untold) == 1:
                yield from for_some(text, untold[0], sizes)


def _limits(varying: Sequence[tuple[Place, Any]], texts: Sequence[str]) -> SizeLimits:
    """Return limits of those places alone that the conditions read."""
    slots = [f"{{{number}}}" for number in range(len(varying))]
    read = [number for number, slot in enumerate(slots) if any(slot in text for text in texts)]
    numbers = {slots[number]: f"{{{place}}}" for place, number in enumerate(read)}
    shown = [re.sub(r"\{\d+\}", lambda slot: numbers[slot[0]], text) for text in texts]
    return SizeLimits(tuple(varying[number][0] for number in read), tuple(shown))


def varying_sizes(values: Sequence[Any]) -> Iterator[tuple[Place, Any]]:
    """Yield the sizes that vary of example values, and the numbers that do, as expressions."""
    for leaf, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            yield from (
                ((leaf, dim), expression_of(size))
                for dim, size in enumerate(value.shape)
                if varies(size)
            )
        elif isinstance(value, torch.SymInt) and varies(value):
            yield (leaf, None), expression_of(value)


def size_guards(
    ranges: Mapping[sympy.Symbol, Any], conditions: Sequence[str], sources: Mapping[str, Any]
) -> SizeGuards:
    """Return the conditions on a program's sizes.

    Args:
        ranges: The range of each symbol.
        conditions: What else export noted, as Python; of what is not understood it warns.
        sources: What the conditions call each input, with the sizes of a tensor, or a number.
    """
    found = [*_in_bounds(ranges)]
    for condition in conditions:
        try:
            guard = _read(condition, sources)
        except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
            shown = textwrap.shorten(str(condition), 200)
            warnings.warn(
                f"The program notes a condition of its sizes that is not understood, and that "
                f"calls will not be held to: {shown!r}.",
                stacklevel=4,
            )
            continue
        # How one size compares with a number is a bound, which the ranges have.
        if guard is not None and (len(guard.symbols) > 1 or not _BOUND.fullmatch(guard.text)):
            found.append(guard)
    return SizeGuards(tuple(found))


_BOUND = re.compile(r"\{0\} ([<>]=?) (-?\d+)")


def bounds_of(ranges: Mapping[sympy.Symbol, Any]) -> dict[sympy.Symbol, Bounds]:
    """Return the smallest and the largest number that each symbol may be; None where any.

    Export assumes 2 or more to keep sizes of 1 apart while it traces, which nobody asked for.

    Args:
        ranges: The program's ``range_constraints``.
    """
    found: dict[sympy.Symbol, Bounds] = {}
    for symbol, values in ranges.items():
        low, high = _finite(values.lower), _finite(values.upper)
        found[symbol] = (low if low is not None and low > 2 else None, high)
    return found


def _finite(bound: Any) -> int | None:
    # torch writes "no bound" as an infinity of its own, of which no number can be made, or as a
    # number next to the largest of 64 bits.
    is_number = isinstance(bound, int) or getattr(bound, "is_Integer", False)
    return int(bound) if is_number and abs(bound) < NO_BOUND else None


def _in_bounds(ranges: Mapping[sympy.Symbol, Any]) -> Iterator[SizeGuard]:
    for symbol, (low, high) in bounds_of(ranges).items():
        if low is not None:
            yield SizeGuard(f"{{0}} >= {low}", (symbol,))
        if high is not None:
            yield SizeGuard(f"{{0}} <= {high}", (symbol,))


def _read(condition: str, sources: Mapping[str, Any]) -> SizeGuard | None:
    """Return what a condition says of symbols; None if it has none.

    It may come from a file, so that it is read as what it may be, and never run as it is.

    Raises:
        SyntaxError, ValueError, OverflowError, RecursionError, MemoryError: It is something else
            than arithmetic of sizes.
    """
    if not isinstance(condition, str) or len(condition) > _LONGEST:
        raise ValueError("no text, or a long one")
    symbols: dict[sympy.Symbol, str] = {}
    parsed = ast.parse(condition, mode="eval").body
    text = _written(parsed, sources, symbols)
    if isinstance(parsed, ast.Compare):
        text = text[1:-1]  # for people
    _limits_hold((text,), len(symbols))
    return SizeGuard(text, tuple(symbols)) if symbols else None


def _written(node: ast.expr, sources: Mapping[str, Any], symbols: dict[sympy.Symbol, str]) -> str:
    """Return the Python text of a part of a condition.

    Raises:
        ValueError: It is something else than arithmetic of sizes.
    """

    def part(inner: ast.expr) -> str:
        return _written(inner, sources, symbols)

    match node:
        case ast.Constant(value=int() | float() as value) if math.isfinite(value):
            return repr(value)
        case ast.BoolOp(op=ast.And() | ast.Or() as sign, values=values):
            return f"({f' {SIGNS[type(sign)]} '.join(map(part, values))})"
        case ast.UnaryOp(op=ast.Not() | ast.USub() as sign, operand=operand):
            return f"({SIGNS[type(sign)]} {part(operand)})"
        case ast.Compare(left=left, ops=[sign], comparators=[right]) if type(sign) in SIGNS:
            return f"({part(left)} {SIGNS[type(sign)]} {part(right)})"
        case ast.BinOp(
            left=left, op=ast.Pow(), right=ast.Constant(value=int() | float() as power)
        ):
            base = part(left)
            if "**" in base or not 0 <= power <= _HIGHEST_POWER:
                raise ValueError("a power that may be any number")
            return f"({base} ** {power})"
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in SIGNS:
            return f"({part(left)} {SIGNS[type(sign)]} {part(right)})"
        case ast.Call(func=called, args=[_, *more] as args, keywords=[]) if (
            ast.unparse(called) in _CALLS
        ):
            name = _CALLS[ast.unparse(called)]
            if bool(more) is not (name in {"max", "min"}):
                raise ValueError(f"{name} of {len(args)} values")
            return f"{name}({', '.join(map(part, args))})"
    return _source(ast.unparse(node), sources, symbols)


def _source(text: str, sources: Mapping[str, Any], symbols: dict[sympy.Symbol, str]) -> str:
    """Return the text of a size of an input, or of an input that is a number.

    Args:
        text: How the condition has it.
        sources: The sizes of each input, or the number.
        symbols: The symbols that the condition has, with their texts; new ones are added.
    """
    asked = _SIZE.fullmatch(text)
    size = sources.get(text)
    if asked is not None:
        shape, dim = sources.get(asked[1]), int(asked[2])
        size = shape[dim] if isinstance(shape, tuple) and dim < len(shape) else None
    if isinstance(size, int):
        return repr(size)
    if not isinstance(size, sympy.Symbol):
        raise ValueError(f"{text} is no size of an input that varies by itself")
    return symbols.setdefault(size, f"{{{len(symbols)}}}")


@lru_cache(4096)
def _limits_hold(texts: tuple[str, ...], count: int) -> Callable[..., bool]:
    """Return a function of so many sizes that compilers can follow; its text is of our making.

    Export has symbols, of which a question would fix the values. A remainder by a size of 0, say,
    is no size of which the program knows anything.
    """
    names = [f"n{number}" for number in range(count)]
    are_numbers = " and ".join(f"isinstance({name}, numbers)" for name in names)
    all_hold = " and ".join(f"({text.format(*names)})" for text in texts)
    scope: dict[str, Any] = {
        "numbers": (int, torch.SymInt),
        "some": some,
        "is_made": is_made,
        **_FUNCTIONS,
    }
    exec(
        f"def hold({', '.join(names)}):\n"
        f"    if not ({are_numbers}):\n"
        f"        return True\n"
        f"    try:\n"
        f"        return bool({all_hold})\n"
        f"    except (ArithmeticError, ValueError, TypeError):\n"
        f"        return False\n",
        scope,
    )
    made: Callable[..., bool] = scope["hold"]
    return made


def _holds(text: str, sizes: Sequence[int]) -> bool:
    return _limits_hold((text,), len(sizes))(*sizes)
