"""Masks of attention and of its scores: constants, or run-time tensors of floats or bools."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.fx import Node
from torch.types import IntLikeType as Dim

from lowerdeck.serializer import XnnGraph, XnnOperator
from lowerdeck.xnnpack.emit import (
    Call,
    Emission,
    Tracked,
    fake,
    is_fixed,
    is_one,
    resized,
    symbols_refusal,
)
from lowerdeck.xnnpack.operators.contract import Operator, Table, table
from lowerdeck.xnnpack.operators.images import largest_of_rows

NO_SELECT = "XNNPACK has no select op; multiplying by a mask turns infinities into NaN"
_MASKING = -1e4
"""Largest fill taken for a mask of scores. Other fills may replace NaN, which a minimum cannot."""
_aten = torch.ops.aten
_LARGEST = float(torch.finfo(torch.float32).max)


class Mask(NamedTuple):
    """Effect of a mask on an attention.

    Attributes:
        added: Bias that is added to the scores; None for 0.
        kept: Factor of each row of the result: 0 for fully masked rows, else 1; None if no row is
            fully masked. torch returns 0 for fully masked rows, whose softmax would be NaN.
    """

    added: Tracked | None
    kept: Tracked | None


def mask_of(emission: Emission, call: Call, many: int) -> Mask:
    """Return the mask of an attention, broadcastable to its scores.

    Args:
        many: Number of query heads per key head; if above 1, they get a separate dimension.
    """
    if call.args["is_causal"]:
        rows, columns = (int(call.shape(name)[-2]) for name in ("query", "key"))
        return _constant_mask(torch.full((rows, columns), -math.inf).triu(diagonal=1), many)
    node = call.args["attn_mask"]
    if node is None:
        return Mask(None, None)
    tracked = emission.of(node)
    if tracked.is_constant:
        return _constant_mask(emission.constant(node), many)
    value = fake(node)
    bools = value is not None and value.dtype == torch.bool
    # The layers of a model share one mask.
    if (mask_of, many) not in tracked.derived:
        tracked.derived[mask_of, many] = _runtime_mask(emission, tracked, many, bools=bools)
    mask: Mask = tracked.derived[mask_of, many]
    return mask


def mask_refusal(call: Call) -> str | None:
    """Return why XNNPACK cannot apply the mask of an attention, or None."""
    if call.args["attn_mask"] is None or call.is_constant("attn_mask"):
        return None
    shape = call.shape("attn_mask")
    if len(shape) < 2 or len(shape) >= XnnGraph.MAX_RANK:
        return f"its mask has {len(shape)} dimensions, not 2 to {XnnGraph.MAX_RANK - 1}"
    return None


def _constant_mask(data: torch.Tensor, many: int) -> Mask:
    data = _narrowed(data)
    if data.dtype == torch.bool:
        data = torch.zeros(data.shape).masked_fill(~data, -math.inf)
    data = data.float()
    empty = (data == -math.inf).all(-1, keepdim=True)
    kept = None
    if bool(empty.any()):
        data, kept = data.masked_fill(empty, 0.0), (~empty).float()
    added = data if bool(data.any()) else None
    return Mask(
        *(
            None if tensor is None else Tracked.of(_spread(tensor, many))
            for tensor in (added, kept)
        )
    )


def _narrowed(tensor: torch.Tensor) -> torch.Tensor:
    """Reduce dimensions with equal slices to size 1; broadcasting restores them."""
    for axis, size in enumerate(tensor.shape):
        first = tensor.narrow(axis, 0, 1)
        if size > 1 and torch.equal(first.expand_as(tensor), tensor):
            tensor = first
    return tensor


def _spread(tensor: torch.Tensor, many: int) -> torch.Tensor:
    return tensor.reshape([int(size) for size in _spread_sizes(tensor.shape, many)])


def _spread_sizes(shape: Sequence[Dim], many: int) -> Sequence[Dim]:
    """Return the sizes of a mask [batch, heads, rows, columns] for grouped heads."""
    if many == 1 or len(shape) < 3:
        return shape
    groups, inner = (1, 1) if is_one(shape[-3]) else (int(shape[-3]) // many, many)
    return (*shape[:-3], groups, inner, *shape[-2:])


def _runtime_mask(emission: Emission, tracked: Tracked, many: int, *, bools: bool) -> Mask:
    """Convert a run-time mask so that a plain softmax of fully masked rows is not NaN.

    Fully masked rows become finite, so that their softmax is finite, and the result is multiplied
    by 0. Other rows are unchanged, including -inf.
    """
    shape = _spread_sizes(tracked.shape, many)
    mask = emission.plain(tracked)
    mask = mask if shape is tracked.shape else resized(emission, mask, shape)
    varies = symbols_refusal(shape) is not None or not is_fixed(shape[-1])
    if bools:
        most = _any_of_rows(emission, mask) if varies else largest_of_rows(emission, mask)
        # 1 becomes 0 and 0 becomes -1; a row of zeros stays 0.
        moved = emission.binary(XnnOperator.SUBTRACT, mask, most)
        return Mask(emission.binary(XnnOperator.MULTIPLY, moved, _LARGEST), most)
    # -inf stays -inf, and the lowest finite number becomes 0.
    numbers = mask if varies else largest_of_rows(emission, mask)
    above = emission.binary(XnnOperator.ADD, numbers, _LARGEST)
    kept = emission.binary(XnnOperator.ADD, above, 1.0, (0.0, 1.0))
    kept = _any_of_rows(emission, kept) if varies else kept
    # -inf, or 0 for a fully masked row.
    low = emission.binary(XnnOperator.MULTIPLY, kept, -_LARGEST)
    floor = emission.binary(XnnOperator.MULTIPLY, low, 2.0)
    return Mask(emission.binary(XnnOperator.MAXIMUM, mask, floor), kept)


def _any_of_rows(emission: Emission, tensor: Tracked) -> Tracked:
    """Return 1 for each row that contains a 1, else 0; the last dimension is kept with size 1.

    Args:
        tensor: Zeros and ones, of at least two dimensions, any of which may be symbolic.
    """
    *batch, rows, _ = tensor.shape
    rank = len(tensor.shape)
    # Average over the two dimensions before the last: the columns, and one of size 1.
    wide = resized(emission, tensor, (1, *tensor.shape))
    turned = emission.transposed(wide, [*range(1, rank - 1), rank, 0, rank - 1])
    share = emission.add(
        XnnOperator.GLOBAL_AVG_POOLING_2D, (*batch, rows), input_id=emission.id_of(turned)
    )
    ones = emission.binary(
        XnnOperator.MULTIPLY, emission.tracked((*batch, rows), share), 2.0**40, (0.0, 1.0)
    )
    return resized(emission, ones, (*batch, rows, 1))


def _fill_of(call: Call) -> tuple[str, str] | None:
    """Return the names of a fill's number and scores in ``where`` or ``masked_fill``, or None."""
    pairs = [("value", "self")] if "mask" in call.args else [("self", "other"), ("other", "self")]
    return next((pair for pair in pairs if _is_low(call, *pair)), None)


def _is_low(call: Call, name: str, scores: str) -> bool:
    """Return whether an argument is a low number, and the scores are not constant."""
    value = call.args[name]
    is_scalar = isinstance(value, Node) and value.target in _SCALARS and not call.rank(name)
    if is_scalar and call.is_constant(name):
        value = value.args[value.target is _aten.full.default]
    is_low = isinstance(value, (int, float)) and value <= _MASKING
    return is_low and isinstance(call.args[scores], Node) and not call.is_constant(scores)


def _emit_fill(emission: Emission, call: Call) -> None:
    """Clamp the scores to the number where it replaces them, and to infinities elsewhere."""
    names = _fill_of(call)
    assert names is not None
    number, scores = (call.args[name] for name in names)
    mask = call.args.get("mask", call.args.get("condition"))
    low = float(emission.constant(number) if isinstance(number, Node) else number)
    inverted = names[0] == "other"
    bounds = emission.of(mask).derived
    # The layers of a model share one mask.
    key = (_emit_fill, low, inverted)
    if key not in bounds:
        bounds[key] = _bounds(emission, mask, low, inverted=inverted)
    upper, lower = bounds[key]
    result = emission.binary(XnnOperator.MINIMUM, emission.of(scores), upper)
    if low > -math.inf:
        result = emission.binary(XnnOperator.MAXIMUM, result, lower)
    emission.define(call.node, result)


def _bounds(emission: Emission, mask: Node, low: float, *, inverted: bool) -> tuple[Tracked, ...]:
    """Return the upper and the lower bound of scores, of the sizes of their mask."""
    tracked = emission.of(mask)
    if tracked.is_constant:
        tracked = Tracked.of(emission.constant(mask).float())
    operands = (tracked, 0.5) if inverted else (0.5, tracked)
    sign = emission.binary(XnnOperator.SUBTRACT, *operands)
    return (
        emission.binary(XnnOperator.MULTIPLY, sign, math.inf, (low, math.inf)),
        emission.binary(XnnOperator.MULTIPLY, sign, -math.inf, (-math.inf, low)),
    )


_SCALARS = (_aten.scalar_tensor.default, _aten.full.default)
FILLS: Table = table(
    {
        "where.self where.ScalarSelf where.ScalarOther masked_fill.Scalar": Operator(
            _emit_fill,
            lambda call: NO_SELECT if _fill_of(call) is None else None,
            computes=False,
            bools=("condition", "mask"),
        )
    }
)
