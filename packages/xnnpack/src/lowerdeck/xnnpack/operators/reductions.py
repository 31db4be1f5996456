"""Reductions over some dimensions."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import torch
from torch.fx import Node
from torch.types import IntLikeType as Dim

from lowerdeck.serializer import XnnOperator
from lowerdeck.xnnpack.emit import Call, Emission, Tracked, is_fixed, named
from lowerdeck.xnnpack.operators.contract import (
    Integers,
    Operator,
    Table,
    first_of,
    fixed,
    function,
    has_dimensions,
    keeps_dtype,
    one_symbol,
    table,
)
from lowerdeck.xnnpack.operators.elementwise import is_square
from lowerdeck.xnnpack.operators.images import Window, largest_of_rows, mean_of_images, pool
from lowerdeck.xnnpack.operators.normalization import row_mean, shift_by_first
from lowerdeck.xnnpack.payload import FLOAT, Layout

_aten = torch.ops.aten


def _axes(call: Call) -> list[int]:
    rank = call.rank("self")
    axes = call.args.get("dim")
    if isinstance(axes, int):
        return [axes % rank]
    return sorted({int(axis) % rank for axis in (axes or range(rank))})


def _mean(e: Emission, x: Tracked, call: Call) -> Tracked:
    source = call.args["self"]
    if not e.writes.is_int8 and _is_subtracted(call.node, source):
        return _refined_mean(e, x, call)
    return _mean_of(e, x, call, in_parts=is_square(source) and e.writes == FLOAT)


def _is_subtracted(mean: Node, source: Node) -> bool:
    """Return whether a mean is subtracted from its input, as in hand-written norms."""
    readers = list(mean.users)
    for reader in readers:
        if reader.target in _VIEWS:
            readers.extend(reader.users)
    differences = (_aten.sub.Tensor, _aten.rsub.Tensor)
    return any(user.target in differences and source in user.args for user in readers)


def _refined_mean(emission: Emission, tracked: Tracked, call: Call) -> Tracked:
    """Return the mean, plus the mean of the residuals.

    This corrects the rounding error, so that the mean of equal numbers is exact. The first mean is
    rounded to 12 significant bits (Veltkamp splitting), so that residuals of equal numbers are
    exact.
    """
    axes = _axes(call)
    mean = mean_over(emission, tracked, axes, keep=True, in_parts=True)
    scaled = emission.binary(XnnOperator.MULTIPLY, mean, 4097.0)
    rounding = emission.binary(XnnOperator.SUBTRACT, scaled, mean)
    mean = emission.binary(XnnOperator.SUBTRACT, scaled, rounding)
    residual = emission.binary(XnnOperator.SUBTRACT, tracked, mean)
    residual = mean_over(emission, residual, axes, keep=True, in_parts=True)
    mean = emission.binary(XnnOperator.ADD, mean, residual)
    keep = bool(call.args.get("keepdim"))
    return mean if keep else emission.view(mean, _reduced(tracked.shape, axes, keep=False))


def _sum(e: Emission, x: Tracked, call: Call) -> Tracked:
    return e.binary(XnnOperator.MULTIPLY, _mean_of(e, x, call), float(_count(call)))


def _mean_of(
    emission: Emission, tracked: Tracked, call: Call, *, in_parts: bool = False
) -> Tracked:
    """Return the mean of a tensor over the dimensions of a call."""
    keep = bool(call.args.get("keepdim"))
    return mean_over(emission, tracked, _axes(call), keep=keep, in_parts=in_parts)


def mean_over(
    emission: Emission,
    tracked: Tracked,
    axes: Sequence[int],
    *,
    keep: bool,
    in_parts: bool = False,
) -> Tracked:
    """Return the mean of a tensor over some of its dimensions.

    Args:
        axes: The dimensions, in order.
        keep: Whether to keep the dimensions with size 1.
        in_parts: Whether to sum in parts instead of by global pooling, which accumulates
            sequentially; ignored if a reduced size is symbolic.
    """
    shape = _reduced(tracked.shape, axes, keep=keep)
    in_parts = in_parts and all(is_fixed(tracked.shape[axis]) for axis in axes)
    layout = None if in_parts else _pooling_layout(axes, tracked)
    if layout is None:
        stretch = None if in_parts else _stretch_layout(emission, tracked, axes, keep=keep)
        if stretch is not None:
            return _mean_of_stretch(emission, tracked, axes, stretch, keep=keep)
        mean = row_mean(emission, _as_rows(emission, tracked, axes))
        stays = keep and list(axes) == [len(shape) - 1]
        return mean if stays else emission.view(mean, shape)
    source, layout = emission.id_of(tracked, layout), layout if keep else Layout.PLAIN
    return mean_of_images(emission, source, shape, layout, keep=keep)


def _stretch_layout(
    emission: Emission, tracked: Tracked, axes: Sequence[int], *, keep: bool
) -> Layout | None:
    """Return a layout in which the dimensions are adjacent and can be averaged at once, or None.

    Means along the last dimension use a linear layer instead, except for integers.
    """
    rank = len(tracked.shape)
    for layout in (tracked.preferred, *Layout):
        if _are_at_once(axes, layout, rank, keep=keep):
            last = max(layout.position(axis, rank) for axis in axes) == rank - 1
            return layout if emission.writes.is_int8 or not last else None
    return None


def _are_at_once(axes: Sequence[int], layout: Layout, rank: int, *, keep: bool) -> bool:
    """Return whether dimensions are adjacent, and the others keep torch's order."""
    places = sorted(layout.position(axis, rank) for axis in axes)
    ordered = layout is Layout.PLAIN or keep or 0 not in axes
    return ordered and places == list(range(places[0], places[0] + len(places)))


def _mean_of_stretch(
    emission: Emission, tracked: Tracked, axes: Sequence[int], layout: Layout, *, keep: bool
) -> Tracked:
    """Average consecutive dimensions in memory by treating them as the width of images."""
    sizes = layout.arrange(tracked.shape)
    places = sorted(layout.position(axis, len(sizes)) for axis in axes)
    before, after = sizes[: places[0]], sizes[places[-1] + 1 :]
    count = math.prod(sizes[places[0] : places[-1] + 1])
    image = (math.prod(before), 1, count, math.prod(after))
    value = emission.reshaped(emission.id_of(tracked, layout), image)
    mean = mean_of_images(emission, value, (image[0], 1, 1, image[3]))
    shape = _reduced(tracked.shape, axes, keep=keep)
    # Without channels, or with only channels, the result has the plain layout.
    stays = len(shape) > 2 and (keep or 1 not in axes)
    result = layout if stays else Layout.PLAIN
    value = emission.reshaped(mean.ids[Layout.PLAIN], result.arrange(shape))
    return emission.tracked(shape, value, result)


def _reduced(shape: Sequence[Dim], axes: Sequence[int], *, keep: bool) -> tuple[Dim, ...]:
    """Return the sizes of a reduction."""
    sizes = [1 if axis in axes else size for axis, size in enumerate(shape)]
    return tuple(size for axis, size in enumerate(sizes) if keep or axis not in axes)


def _pooling_layout(axes: Sequence[int], tracked: Tracked) -> Layout | None:
    """Return the layout in which the dimensions are height and width of images, or None."""
    if len(tracked.shape) != 4:
        return None
    if list(axes) == [2, 3]:
        return Layout.CHANNELS_LAST
    # In the plain layout these two are at the positions of an image's height and width.
    plain = tracked.preferred is Layout.PLAIN
    return Layout.PLAIN if list(axes) == [1, 2] and plain else None


def _as_rows(emission: Emission, tracked: Tracked, axes: Sequence[int]) -> Tracked:
    """Return a tensor with some dimensions moved to the end and merged."""
    kept = [axis for axis in range(len(tracked.shape)) if axis not in axes]
    moved = emission.transposed(tracked, [*kept, *axes])
    if len(axes) == 1:
        return moved
    width = math.prod(moved.shape[len(kept) :])
    return emission.view(moved, (*moved.shape[: len(kept)], width))


def _variance_of(emission: Emission, tracked: Tracked, call: Call) -> Tracked:
    """Return the mean of squared deviations."""
    axes = _axes(call)
    shifted = shift_by_first(emission, tracked, axes)
    mean = mean_over(emission, shifted, axes, keep=True, in_parts=True)
    centred = emission.binary(XnnOperator.SUBTRACT, shifted, mean)
    squares = emission.unary(XnnOperator.SQUARE, centred)
    result = _mean_of(emission, squares, call, in_parts=True)
    factor = _count(call) / (_count(call) - _correction(call))
    return result if factor == 1 else emission.binary(XnnOperator.MULTIPLY, result, factor)


def _variance(emission: Emission, call: Call) -> None:
    """Define a variance or standard deviation, and optionally the mean."""
    tracked = emission.of(call.args["self"])
    result = _variance_of(emission, tracked, call)
    if call.node.target in _DEVIATIONS:
        result = emission.unary(XnnOperator.SQUARE_ROOT, result)
    if isinstance(call.node.meta["val"], torch.Tensor):
        emission.define(call.node, result)
        return
    for user in call.node.users:
        first = user.args[1] == 0
        emission.define(user, result if first else _refined_mean(emission, tracked, call))


def _correction(call: Call) -> float:
    correction = call.args.get("correction", call.args.get("unbiased"))
    return 1.0 if correction is None else float(correction)


def _results_refusal(call: Call) -> str | None:
    several = not isinstance(call.node.meta["val"], torch.Tensor)
    if several and any(reader.target is not operator.getitem for reader in call.node.users):
        return "its results are used as a list"
    if not isinstance(call.args.get("correction"), (int, float, type(None))):
        return "its correction is not a plain number"
    return None if _count(call) > _correction(call) else "its divisor is not positive"


def _count(call: Call) -> int:
    return math.prod(int(call.shape("self")[axis]) for axis in _axes(call))


def _vector_norm(e: Emission, x: Tracked, call: Call) -> Tracked:
    """Return the 2-norm as ``sqrt(mean(x^2)) * sqrt(count)``."""
    mean = _mean_of(e, e.unary(XnnOperator.SQUARE, x), call)
    root = e.unary(XnnOperator.SQUARE_ROOT, mean)
    return e.binary(XnnOperator.MULTIPLY, root, math.sqrt(_count(call)))


def _mean_refusal(call: Call) -> str | None:
    is_pool = call.node.target in _MEANS and call.rank() == 4 and _axes(call) == [2, 3]
    # Sums along kept rows need no reshape.
    is_along_rows = bool(call.args.get("keepdim")) and _axes(call) == [call.rank() - 1]
    if is_pool or is_along_rows:
        return None if is_pool else _FIXED(call)
    return first_of(_FIXED, one_symbol)(call)


def _order_refusal(call: Call) -> str | None:
    return None if call.args["ord"] == 2 else "only the norm of order 2 is supported"


def _maximum(e: Emission, x: Tracked, call: Call) -> Tracked:
    shape = call.result
    if not _is_over_images(call):
        return e.view(largest_of_rows(e, _as_rows(e, x, _axes(call))), shape)
    axes, layout = _axes(call), Layout.CHANNELS_LAST
    rows, columns = (Window(int(x.shape[axis]) if axis in axes else 1) for axis in (2, 3))
    pooled = [1 if axis in axes else size for axis, size in enumerate(x.shape)]
    image = e.tracked(x.shape, e.id_of(x, layout), layout)
    most = pool(e, XnnOperator.MAX_POOLING_2D, image, pooled, rows, columns)
    return most if call.args.get("keepdim") else e.view(most, shape)


def _is_over_images(call: Call) -> bool:
    return call.rank("self") == 4 and set(_axes(call)) <= {2, 3}


def _maximum_refusal(call: Call) -> str | None:
    keeps = _is_over_images(call) and call.args.get("keepdim")
    return None if keeps else one_symbol(call)


def _minimum(e: Emission, x: Tracked, call: Call) -> Tracked:
    """Return ``-max(-x)``."""
    rows = _as_rows(e, e.unary(XnnOperator.NEGATE, x), _axes(call))
    negated_minimum = e.view(largest_of_rows(e, rows), call.result)
    return e.unary(XnnOperator.NEGATE, negated_minimum)


def _mean_int8_refusal(call: Call) -> str | None:
    if refusal := one_symbol(call):
        return refusal
    axes, rank, keep = _axes(call), call.rank("self"), bool(call.args.get("keepdim"))
    if not any(_are_at_once(axes, layout, rank, keep=keep) for layout in Layout):
        return "XNNPACK averages integers over neighbouring dimensions only"
    return None


_DEVIATIONS = frozenset(
    named("std std.correction std.dim std_mean std_mean.correction std_mean.dim")
)
_VIEWS = frozenset(named("view reshape unsqueeze expand view_copy unsqueeze_copy expand_copy"))
_MEANS = frozenset(named("mean mean.dim"))
_FIXED = fixed(
    lambda call: [call.shape()[axis] for axis in _axes(call)], "it reduces a symbolic size"
)
_SUMS = first_of(keeps_dtype, has_dimensions, _mean_refusal)
_MOST = first_of(has_dimensions, _FIXED, _maximum_refusal)
REDUCTIONS: Table = table(
    {
        "linalg_vector_norm": function(_vector_norm, _order_refusal, _SUMS, _FIXED, wide=True),
        "amax max max.dim": function(_maximum, _MOST, integers=Integers.KEEPS),
        "amin min min.dim": function(_minimum, _MOST),
        "var var.correction var.dim var_mean var_mean.correction var_mean.dim std std.correction "
        "std.dim std_mean std_mean.correction std_mean.dim": Operator(
            _variance, first_of(_SUMS, _FIXED, _results_refusal), wide=True
        ),
        "mean mean.dim": function(
            _mean, _SUMS, integers=Integers.CHOOSES, int8_refusal=_mean_int8_refusal, wide=True
        ),
        "sum sum.dim_IntList": function(_sum, _SUMS, wide=True),
    }
)
