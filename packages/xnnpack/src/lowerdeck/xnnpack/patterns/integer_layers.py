"""Patterns of torchao's two decompositions of a linear layer with an int8 weight.

Dynamic activations: rows are quantised, multiplied by ``_int_mm`` and rescaled in about twenty
calls. Weight-only: ``mm`` with the weight cast to float, and a scale. Both become ``linear`` with
a dequantised weight.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from lowerdeck.torch_base import OpOverload, arguments_of
from lowerdeck.xnnpack.emit import fake, shape_of
from lowerdeck.xnnpack.emit import same_sizes as same
from lowerdeck.xnnpack.operators.quantization import chosen_by, name_of
from lowerdeck.xnnpack.operators.shapes import order_of
from lowerdeck.xnnpack.patterns.matching import Leaf, Match, Pattern, Piece, Viewed
from lowerdeck.xnnpack.patterns.pieces import ANY, Arguments, OperatorPattern, Prepared, turned

_ROUNDED = "torchao.quantize_affine.default"
_INT8 = (-128, 127)
_RANGES = (_INT8, (-64, 63))
_LIMITS = (torch.int8, *_INT8)


def _layer(match: Match) -> Arguments | None:
    rows, weight, scale, bias = (
        match.bindings.get(name) for name in ("rows", "weight", "scale", "bias")
    )
    assert rows is not None
    real = rows.args[0] if name_of(rows) == _ROUNDED else rows
    value, result, integers, scales = map(fake, (real, match.pieces[0], weight, scale))
    if value is None or result is None or integers is None or scales is None:
        return None
    count, width = integers.shape
    if (
        value.dtype != result.dtype
        or order_of(match.bindings["turned"]) != [1, 0]
        or not same(result.shape, (*value.shape[:-1], count))
        or not same(value.shape[-1:], [width])
        or scales.numel() not in (1, count)
        or (bias is not None and not same(shape_of(bias), [count]))
        or ("step" in match.bindings) != (real is not rows)
        or (real is not rows and not _is_by_row(match, rows))
    ):
        return None
    block = [count if scales.numel() == 1 else 1, width]
    args = (weight, block, scale, None, *_LIMITS, value.dtype)
    return (
        _dequantized_rows(rows, value),
        Prepared(_dequantize(), args, value.dtype, "weight"),
        bias,
    )


def _dequantized_rows(rows: Node, value: torch.Tensor) -> Node | Prepared:
    if name_of(rows) != _ROUNDED:
        return rows
    args = arguments_of(rows)
    how = (rows, args["block_size"], args["scale"], args["zero_point"], *_LIMITS, value.dtype)
    return Prepared(_dequantize(), how, value.dtype, "rows")


def _dequantize() -> OpOverload:
    # Registered when torchao is imported, as it is if a program has such layers.
    return torch.ops.torchao.dequantize_affine.default


def _is_by_row(match: Match, rows: Node) -> bool:
    """Return whether rows are quantised per row to 8 or 7 bits with the matched scale."""
    args, scale = arguments_of(rows), match.bindings["step"]
    if (
        scale is not args["scale"]
        or match.bindings.get("zero", args["zero_point"]) is not (args["zero_point"])
    ):
        return False
    choice = chosen_by(scale)
    # Without zero points in the product, the quantisation must be symmetric.
    return (
        name_of(choice) == "torchao.choose_qparams_affine.default"
        and ("zero" in match.bindings or str(choice.args[1]) == "SYMMETRIC")
        and (args["quant_min"], args["quant_max"]) in _RANGES
        and same(args["block_size"][-1:], shape_of(args["input"])[-1:])
    )


def _times(left: Pattern, right: Pattern) -> Piece:
    return Piece("mul.Tensor", Viewed(left), Viewed(right), commutes=True)


def _less(left: Pattern, right: Pattern) -> Piece:
    return Piece("sub.Tensor", Viewed(left), Viewed(right))


_ROWS, _ROW_SCALE, _INTEGERS = Leaf("rows"), Leaf("step"), Viewed(Leaf("weight", torch.int8))
_TRANSPOSED = Viewed(turned(_INTEGERS, "turned"))
# Some processors multiply unsigned integers faster: 128 is added before and subtracted after.
_UNSIGNED = Viewed(Piece("add.Tensor", Viewed(_ROWS), 128))
_SUMS = Viewed(Piece("sum.dim_IntList", _TRANSPOSED, ([0], [-2]), ANY))
_PRODUCT = (
    _less(Piece("_int_mm", _UNSIGNED, _TRANSPOSED), Piece("mul.Tensor", _SUMS, 128)),
    Piece("_int_mm", Viewed(_ROWS), _TRANSPOSED),
)
_SCALED_BY_ROW = _times(_PRODUCT, _ROW_SCALE)
_ZERO_POINT_CORRECTION = _times(
    _times(Leaf("zero"), _ROW_SCALE), Piece("sum.dim_IntList", _INTEGERS, ([1], [-1]), ANY)
)
_SCALED = _times(
    (
        _less(_SCALED_BY_ROW, _ZERO_POINT_CORRECTION),
        _SCALED_BY_ROW,
        Piece("mm", Viewed(_ROWS), _TRANSPOSED),
    ),
    Leaf("scale"),
)
INTEGER_LAYERS = tuple(
    OperatorPattern(torch.ops.aten.linear.default, Viewed(piece), _layer)
    for piece in (Piece("add.Tensor", Viewed(_SCALED), Leaf("bias")), _SCALED)
)
