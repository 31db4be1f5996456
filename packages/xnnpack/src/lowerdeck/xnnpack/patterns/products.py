"""Patterns of linear layers and matrix products."""

from __future__ import annotations

import torch
from torch.types import IntLikeType as Dim

from lowerdeck.xnnpack.emit import broadcast, same_sizes, shape_of
from lowerdeck.xnnpack.patterns.matching import Leaf, Match, Piece
from lowerdeck.xnnpack.patterns.pieces import (
    ANY,
    Arguments,
    B,
    OperatorPattern,
    W,
    X,
    swaps_last_two,
    turned,
    view,
)

_aten = torch.ops.aten


def _linear(match: Match) -> Arguments | None:
    x, w, b = (match.bindings[name] for name in ("x", "w", "b"))
    is_layer = swaps_last_two(match.bindings["turned"]) and len(shape_of(b)) == 1
    return (x, w, b) if is_layer and _is_row_by_row(match, shape_of(w)[0]) else None


def _rows_times_matrix(match: Match) -> Arguments | None:
    x, w = match.bindings["x"], match.bindings["w"]
    if len(shape_of(x)) < 2 or not _is_row_by_row(match, shape_of(w)[1]):
        return None
    return (x, w)


def _rows_times_matrix_and_bias(match: Match) -> Arguments | None:
    """Return the arguments of an addmm of rows in several dimensions, as in GPT-2's Conv1D."""
    operands = _rows_times_matrix(match)
    return None if operands is None else (match.bindings["b"], *operands)


def _is_row_by_row(match: Match, columns: Dim) -> bool:
    """Return whether rows are flattened to one matrix, and the result is unflattened."""
    shape = shape_of(match.bindings["x"])
    if not shape or not same_sizes(shape_of(match.pieces[0]), (*shape[:-1], columns)):
        return False
    return same_sizes(shape_of(match.bindings["rows"])[1:], shape[-1:])


def _product(match: Match) -> Arguments | None:
    left, right = match.bindings["x"], match.bindings["w"]
    result = shape_of(match.pieces[0])
    wide = [
        shape_of(match.bindings.get(name, operand))
        for name, operand in (("wide left", left), ("wide right", right))
    ]
    flat = [shape_of(match.bindings[name]) for name in ("left", "right")]
    if len(result) < 3 or any(len(shape) != 3 for shape in flat):
        return None
    if not all(
        same_sizes(shape[:-2], result[:-2]) and same_sizes(shape[-2:], rows[1:])
        for shape, rows in zip(wide, flat, strict=True)
    ):
        return None
    if not same_sizes(result[-2:], (wide[0][-2], wide[1][-1])):
        return None
    batches = broadcast(shape_of(left)[:-2], shape_of(right)[:-2])
    return (left, right) if same_sizes(batches, result[:-2]) else None


def _side(leaf: Leaf, name: str) -> Piece:
    wide = Piece("expand", leaf, ANY, name=f"wide {name}")
    return view((wide, leaf), name)


_ROWS = view(X, "rows")
_ADDMM = Piece("addmm", B, _ROWS, turned(W, "turned"))
_BMM = Piece("bmm", _side(X, "left"), _side(W, "right"))
PRODUCTS = (
    OperatorPattern(_aten.linear.default, view(_ADDMM), _linear),
    OperatorPattern(_aten.matmul.default, view(Piece("mm", _ROWS, W)), _rows_times_matrix),
    OperatorPattern(
        _aten.addmm.default,
        view(Piece("addmm", B, _ROWS, W)),
        _rows_times_matrix_and_bias,
    ),
    OperatorPattern(_aten.matmul.default, view(_BMM), _product),
)


def _layer(match: Match) -> Arguments | None:
    """Return the arguments of a linear layer whose input is not contiguous."""
    x, w, b = (match.bindings.get(name) for name in ("x", "w", "b"))
    shape, weight = shape_of(x), shape_of(w)  # type: ignore[arg-type]  # leaves
    if len(weight) != 2 or not swaps_last_two(match.bindings["turned"]):
        return None
    if b is not None and not same_sizes(shape_of(b), weight[:1]):
        return None
    return (x, w, b) if same_sizes(shape[-1:], weight[1:]) else None


_TURNED_PRODUCT = Piece("matmul", X, turned(W, "turned"))
LAYERS = (
    OperatorPattern(
        _aten.linear.default,
        Piece("add.Tensor", _TURNED_PRODUCT, B, commutes=True),
        _layer,
    ),
    OperatorPattern(_aten.linear.default, _TURNED_PRODUCT, _layer),
)
