"""Patterns of unary functions and norms."""

from __future__ import annotations

import torch

from lowerdeck.xnnpack.emit import is_fixed, is_one, same_sizes, shape_of
from lowerdeck.xnnpack.patterns.matching import Amount, LastAxis, Match, Pattern, Piece
from lowerdeck.xnnpack.patterns.pieces import ADD, DIV, MUL, Arguments, OperatorPattern, W, X

_aten = torch.ops.aten


def _six(pattern: Pattern) -> Pattern:
    """Return the pattern of a tensor clamped to 0 and 6."""
    return (
        Piece("clamp", Piece("clamp", pattern, 0), None, 6),
        Piece("clamp", pattern, 0, 6),
        Piece("clamp_max", Piece("clamp_min", pattern, 0), 6),
        Piece("hardtanh", pattern, 0, 6),
        Piece("relu6", pattern),
    )


def _of_x(match: Match) -> Arguments | None:
    return (match.bindings["x"],)


_SHIFTED = _six(Piece(ADD, X, 3))
_SIXTH = Piece(DIV, _SHIFTED, 6)


def _prelu(match: Match) -> Arguments | None:
    x, slope = match.bindings["x"], match.bindings["w"]
    sizes, shape = shape_of(slope), shape_of(x)
    one_each = len(sizes) == len(shape) > 1 and all(
        same_sizes([size], [shape[1]]) if axis == 1 else is_one(size)
        for axis, size in enumerate(sizes)
    )
    return (x, slope) if one_each or all(map(is_one, sizes)) else None


_POSITIVE = Piece("gt.Scalar", X, 0)
_PRELU = Piece("where.self", _POSITIVE, X, Piece(MUL, W, X, commutes=True))


FUNCTIONS = (
    OperatorPattern(
        _aten.hardswish.default, Piece(DIV, Piece(MUL, X, _SHIFTED, commutes=True), 6), _of_x
    ),
    OperatorPattern(_aten.hardswish.default, Piece(MUL, X, _SIXTH, commutes=True), _of_x),
    OperatorPattern(_aten.hardsigmoid.default, _SIXTH, _of_x),
    OperatorPattern(_aten._prelu_kernel.default, _PRELU, _prelu),
)


def _rms_norm(match: Match) -> Arguments | None:
    x, w, eps = (match.bindings.get(name) for name in ("x", "w", "eps"))
    (width,) = shape_of(x)[-1:]  # type: ignore[arg-type]  # a leaf
    if not is_fixed(width) or not float(eps or 0) > 0:
        return None
    if w is not None and not same_sizes(shape_of(w), [width]):
        return None
    return (x, [int(width)], w, eps)


_SQUARE = (
    Piece("pow.Tensor_Scalar", X, 2),
    Piece("square", X),
    Piece("mul.Tensor", X, X),
)
_MEAN = Piece("mean.dim", _SQUARE, LastAxis(), True)
_VARIANCE = Piece(ADD, _MEAN, Amount("eps"))
_FACTOR = (Piece("rsqrt", _VARIANCE), Piece("pow.Tensor_Scalar", _VARIANCE, -0.5))
_NORMED = Piece("mul.Tensor", X, _FACTOR, commutes=True)
NORMS = (
    OperatorPattern(
        _aten.rms_norm.default,
        Piece("mul.Tensor", _NORMED, W, commutes=True),
        _rms_norm,
    ),
    OperatorPattern(_aten.rms_norm.default, _NORMED, _rms_norm),
)
