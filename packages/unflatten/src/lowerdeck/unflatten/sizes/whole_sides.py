"""Conditions of which a module has a whole side: ``b*t > 8``, where it is given ``b*t`` alone."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]

from lowerdeck.unflatten._torch_private import SIZE_FUNCTIONS
from lowerdeck.unflatten.sizes.solving import SizeSolver, text_of

_SIGNS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: SIZE_FUNCTIONS.FloorDiv,
    ast.Mod: SIZE_FUNCTIONS.PythonMod,
    ast.Pow: operator.pow,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "max": SIZE_FUNCTIONS.Max,
    "min": SIZE_FUNCTIONS.Min,
    "int": SIZE_FUNCTIONS.TruncToInt,
    "float": SIZE_FUNCTIONS.ToFloat,
    "floor": SIZE_FUNCTIONS.FloorToInt,
    "ceil": SIZE_FUNCTIONS.CeilToInt,
}
SIGNS: dict[type[ast.AST], str] = {
    ast.And: "and",
    ast.Or: "or",
    ast.Not: "not",
    ast.USub: "-",
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
}
"""What conditions compute and compare with, as Python writes it; but for powers, of which a file
may have any."""


def told_by_wholes(
    text: str, symbols: Sequence[sympy.Symbol], solver: SizeSolver, slots: Sequence[str]
) -> str | None:
    """Return the text of a condition on symbols as known sizes tell it; None if they do not.

    Args:
        text: The condition as Python, ``{0}`` for the first symbol.
        symbols: The symbols.
        solver: Knows the sizes.
        slots: The text of each of them.
    """
    names = [f"s{number}" for number in range(len(symbols))]
    known = dict(zip(names, symbols, strict=True))
    try:
        return _told(ast.parse(text.format(*names), mode="eval").body, known, solver, slots)
    except (ArithmeticError, AssertionError, RecursionError, TypeError, ValueError):
        # Of a file: it divides by 0, say, which sympy says while it reads that.
        return None


def _told(
    node: ast.expr, known: dict[str, sympy.Symbol], solver: SizeSolver, slots: Sequence[str]
) -> str | None:
    match node:
        case ast.BoolOp(op=op, values=values):
            parts = [_told(value, known, solver, slots) for value in values]
            sign = " and " if isinstance(op, ast.And) else " or "
            return None if None in parts else f"({sign.join(map(str, parts))})"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            told = _told(operand, known, solver, slots)
            return None if told is None else f"(not {told})"
        case ast.Compare(left=left, ops=[sign], comparators=[right]):
            texts = [_side(side, known, solver, slots) for side in (left, right)]
            if None in texts:
                # b > t + 3, of b - t.
                apart = ast.BinOp(left=left, op=ast.Sub(), right=right)
                texts = [_found(apart, known, solver, slots), "0"]
            return None if None in texts else f"{texts[0]} {SIGNS[type(sign)]} {texts[1]}"
    return None


def _side(
    node: ast.expr, known: dict[str, sympy.Symbol], solver: SizeSolver, slots: Sequence[str]
) -> str | None:
    """Return the text of a side of a comparison: the largest parts of it that sizes tell."""
    text = _found(node, known, solver, slots)
    if text is not None:
        return text
    match node:
        case ast.Call(func=ast.Name(id=name), args=args):
            parts = [_side(arg, known, solver, slots) for arg in args]
            return None if None in parts else f"{name}({', '.join(map(str, parts))})"
        case ast.BinOp(left=left, op=op, right=right):
            parts = [_side(part, known, solver, slots) for part in (left, right)]
            return (
                None if None in parts else f"({parts[0]} {SIGNS.get(type(op), '**')} {parts[1]})"
            )
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            part = _side(operand, known, solver, slots)
            return None if part is None else f"(-{part})"
        case ast.Constant(value=value):
            return repr(value)
    return None


def _found(
    node: ast.expr, known: dict[str, sympy.Symbol], solver: SizeSolver, slots: Sequence[str]
) -> str | None:
    size = _expression(node, known)
    found = None if size is None else solver.find(size)
    return None if found is None else text_of(found, solver, slots)


def _expression(node: ast.expr, known: dict[str, sympy.Symbol]) -> Any:
    """Return what a part of a condition is, as export has it; None if it is something else."""
    match node:
        case ast.Constant(value=int() as number):
            return sympy.Integer(number)
        case ast.Constant(value=float() as number):
            return sympy.Float(number)
        case ast.Name(id=name) if name in known:
            return known[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            part = _expression(operand, known)
            return None if part is None else -part
        case ast.BinOp(left=left, op=op, right=right):
            parts = [_expression(side, known) for side in (left, right)]
            if None in parts:
                return None
            if isinstance(op, ast.Div):
                are_whole = all(part.is_integer for part in parts)
                name = "IntTrueDiv" if are_whole else "FloatTrueDiv"
                return getattr(SIZE_FUNCTIONS, name)(*parts)
            return _SIGNS[type(op)](*parts)
        case ast.Call(func=ast.Name(id=name), args=args):
            parts = [_expression(arg, known) for arg in args]
            return None if None in parts else _FUNCTIONS[name](*parts)
    return None
