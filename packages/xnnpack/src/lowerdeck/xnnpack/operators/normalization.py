"""Layer, RMS, group and instance norms."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch
from torch.types import IntLikeType as Dim

from lowerdeck.serializer import XnnEncoding, XnnOperator
from lowerdeck.xnnpack.emit import (
    Call,
    Emission,
    Tracked,
    is_fixed,
    is_one,
    resized,
    symbols_refusal,
)
from lowerdeck.xnnpack.operators.contract import (
    Table,
    constants,
    first_of,
    fixed,
    function,
    one_symbol,
    table,
)
from lowerdeck.xnnpack.operators.images import image_sizes, mean_of_images
from lowerdeck.xnnpack.payload import Layout

_PART = 16
"""Maximum number of terms of one sum; a linear layer computes as many sums in the time of one."""
_WIDE = 512
"""Wider rows are summed faster by pooling than by a linear layer."""
_TOKEN = 256
"""Widest rows that layer norms sum at once: sums in parts are slower, and rarely more accurate."""
_ELSEWHERE = 2.0**-64
"""Weight of an element in the sums of other parts, small enough not to change them. With a weight
of 0, an infinity would make those sums NaN; with this weight they are infinite, like the sum of
the row.
"""


def row_mean(
    emission: Emission, tensor: Tracked, offset: float = 0.0, *, at_once: int = _PART
) -> Tracked:
    """Return the mean along the last dimension, kept with size 1.

    A linear layer with a weight of 1/K computes it. As it accumulates sequentially, long rows are
    first summed in parts, which is about as accurate as eager.

    Args:
        tensor: The tensor, in the plain layout, with a static last dimension.
        offset: Added to the mean.
        at_once: The widest rows that are summed without parts.
    """
    *rows, width = tensor.shape
    in_parts, share = width > at_once, 1 / int(width)
    can_pool = symbols_refusal(rows) is None
    while in_parts and tensor.shape[-1] > _PART:
        parts = _pooled_parts if can_pool and tensor.shape[-1] > _WIDE else _summed_parts
        tensor = parts(emission, tensor)
        share *= _PART
    row = torch.full((1, int(tensor.shape[-1])), share)
    return weighted_sums(emission, tensor, row, torch.tensor([offset]) if offset else None)


def _summed_parts(emission: Emission, tensor: Tracked) -> Tracked:
    """Return the sums of at most 16 parts of each row, divided by 16."""
    width = int(tensor.shape[-1])
    parts = min(_PART, math.ceil(width / _PART))
    part_of = torch.arange(width) * parts // width
    weights = torch.where(part_of == torch.arange(parts)[:, None], 1 / _PART, _ELSEWHERE)
    return weighted_sums(emission, tensor, weights)


def _pooled_parts(emission: Emission, tensor: Tracked) -> Tracked:
    """Return means of 16 elements each: of every n-th element of a row, for n means."""
    *rows, width = tensor.shape
    parts = math.ceil(int(width) / _PART)
    missing, none = parts * _PART - int(width), (0,) * len(rows)
    if missing:
        tensor = emission.padded(tensor, (*none, 0), (*none, missing))
    count = math.prod(rows)
    value = emission.reshaped(emission.id_of(tensor), (count, 1, _PART, parts))
    return emission.view(mean_of_images(emission, value, (count, 1, 1, parts)), (*rows, parts))


def weighted_sums(
    emission: Emission,
    tensor: Tracked,
    weights: torch.Tensor,
    bias: torch.Tensor | None = None,
    encoding: XnnEncoding | None = None,
) -> Tracked:
    """Return weighted sums along the last dimension, computed by a linear layer.

    Args:
        weights: One row for each result.
        encoding: Encoding of the weights; that of the results by default.
    """
    shape = (*tensor.shape[:-1], len(weights))
    ids = emission.packed(weights, encoding), emission.packed(bias)
    return emission.layer(emission.id_of(tensor), shape, ids)


def shift_by_first(emission: Emission, tracked: Tracked, axes: Collection[int]) -> Tracked:
    """Return a tensor minus its first element along some dimensions.

    The rounded mean of equal numbers may differ from them, and a norm divides the difference by
    the root of eps. After the subtraction, a constant row is exactly 0.
    """
    rank = len(tracked.shape)
    first = emission.part(tracked, (0,) * rank, [int(axis in axes) for axis in range(rank)])
    return emission.binary(XnnOperator.SUBTRACT, tracked, first)


def _standardized(
    emission: Emission, shifted: Tracked, mean: Callable[[Tracked, float], Tracked], eps: float
) -> Tracked:
    """Normalise a tensor to mean 0 and variance 1.

    Args:
        shifted: The tensor minus its first element, see :func:`shift_by_first`.
        mean: Function of a tensor of that shape and a number: returns the mean plus the number.
    """
    centred = emission.binary(XnnOperator.SUBTRACT, shifted, mean(shifted, 0.0))
    variance = mean(emission.unary(XnnOperator.SQUARE, centred), eps)
    factor = emission.unary(XnnOperator.RECIPROCAL_SQUARE_ROOT, variance)
    return emission.binary(XnnOperator.MULTIPLY, centred, factor)


def _standardized_rows(
    emission: Emission, rows: Tracked, eps: float, *, at_once: int = _PART
) -> Tracked:
    """Normalise a tensor in the plain layout along its last dimension: mean 0, variance 1."""
    shifted = shift_by_first(emission, rows, {len(rows.shape) - 1})
    mean = partial(row_mean, emission, at_once=at_once)
    return _standardized(emission, shifted, mean, eps)


def _scaled_and_shifted(
    emission: Emission, tensor: Tracked, call: Call, *, by_channel: bool = False
) -> Tracked:
    """Apply the optional weight and bias of a call."""
    sizes = (1, *tensor.shape[1:2], *(1,) * (len(tensor.shape) - 2))
    for kind, name in ((XnnOperator.MULTIPLY, "weight"), (XnnOperator.ADD, "bias")):
        if call.args.get(name) is not None:
            operand = emission.of(call.args[name])
            if by_channel:
                operand = Tracked.of(emission.constant(call.args[name]).reshape(sizes))
            tensor = emission.binary(kind, tensor, operand, shape=tensor.shape)
    return tensor


def _rms_norm(e: Emission, x: Tracked, call: Call) -> Tracked:
    """Return ``x / sqrt(mean(x^2) + eps)`` over the flattened normalized dimensions."""
    eps = call.args["eps"]
    if eps is None:  # Eager computes in float32 also for float16.
        eps = torch.finfo(torch.float32).eps
    folded = len(call.args["normalized_shape"])
    rows = _rows(e, x, folded)
    mean = row_mean(e, e.unary(XnnOperator.SQUARE, rows), float(eps))
    factor = e.unary(XnnOperator.RECIPROCAL_SQUARE_ROOT, mean)
    result = e.binary(XnnOperator.MULTIPLY, rows, factor)
    result = e.view(result, x.shape) if folded > 1 else result
    return _scaled_and_shifted(e, result, call)


def _layer_norm(e: Emission, x: Tracked, call: Call) -> Tracked:
    folded = len(call.args["normalized_shape"])
    at_once = _PART if folded > 1 else _TOKEN
    result = _standardized_rows(e, _rows(e, x, folded), call.args["eps"], at_once=at_once)
    result = e.view(result, x.shape) if folded > 1 else result
    return _scaled_and_shifted(e, result, call)


def _rows(emission: Emission, tracked: Tracked, folded: int) -> Tracked:
    """Return a tensor in the plain layout with its last dimensions merged."""
    rows = emission.plain(tracked)
    if folded < 2:
        return rows
    kept = tracked.shape[: len(tracked.shape) - folded]
    width = math.prod(int(size) for size in tracked.shape[len(kept) :])
    return emission.view(rows, (*kept, width))


def _group_norm(e: Emission, x: Tracked, call: Call) -> Tracked:
    args = call.args
    groups = int(args["num_groups"] if "num_groups" in args else args["group"])
    if not all(map(is_fixed, x.shape[2:])):
        # Lines with several dynamic sizes become images without a reshape.
        image = resized(e, x, image_sizes(x.shape))
        result = _standardized_by_channels(e, image, groups, args["eps"])
        result = resized(e, result, x.shape)
    elif groups == 1 and len(x.shape) == 4 and x.preferred is Layout.CHANNELS_LAST:
        result = _standardized_by_channels(e, x, 1, args["eps"])
    else:
        result = _standardized_groups(e, x, groups, args["eps"])
    return _scaled_and_shifted(e, result, call, by_channel=True)


def _instance_norm(e: Emission, x: Tracked, call: Call) -> Tracked:
    result = _standardized_groups(e, x, int(x.shape[1]), call.args["eps"])
    return _scaled_and_shifted(e, result, call, by_channel=True)


def _standardized_groups(emission: Emission, tracked: Tracked, groups: int, eps: float) -> Tracked:
    shape = tracked.shape
    flat = (shape[0], groups, math.prod(int(size) for size in shape[1:]) // groups)
    return emission.view(_standardized_rows(emission, emission.view(tracked, flat), eps), shape)


def _standardized_by_channels(
    emission: Emission, tracked: Tracked, groups: int, eps: float
) -> Tracked:
    """Return images of any sizes with mean 0 and variance 1 over each group of their channels."""
    layout = Layout.CHANNELS_LAST
    batch, channels = tracked.shape[:2]
    # With one group the memory order is unchanged: no reshape.
    pooled, rows = (batch, channels, 1, 1), (batch, 1, groups, int(channels) // groups)
    spread = pooled if groups > 1 else (batch, 1, 1, 1)

    def of_rows(tensor: Tracked) -> Tracked:
        """Repeat per-group numbers for each channel."""
        if groups > 1:
            ones = Tracked.of(torch.ones(1, 1, 1, rows[3]))
            tensor = emission.binary(XnnOperator.MULTIPLY, tensor, ones, shape=rows)
        value = emission.reshaped(emission.id_of(tensor), layout.arrange(spread))
        return emission.tracked(spread, value, layout)

    def mean(tensor: Tracked, offset: float) -> Tracked:
        means = mean_of_images(emission, emission.id_of(tensor, layout), pooled, layout)
        means = emission.tracked(rows, emission.reshaped(means.ids[layout], rows))
        return of_rows(row_mean(emission, means, offset))

    first = emission.part(tracked, (0, 0, 0, 0), (0, 0, 1, 1), layout)
    first = emission.tracked(rows, emission.reshaped(first.ids[layout], rows))
    first = emission.part(first, (0, 0, 0, 0), (0, 0, 0, 1))
    shifted = emission.binary(XnnOperator.SUBTRACT, tracked, of_rows(first))
    return _standardized(emission, shifted, mean, eps)


def _folded(call: Call) -> Sequence[Dim]:
    return call.shape()[call.rank() - len(call.args["normalized_shape"]) :]


def _folded_refusal(call: Call) -> str | None:
    return one_symbol(call) if len(_folded(call)) > 1 else None


def _eps_refusal(call: Call) -> str | None:
    eps = call.args["eps"]
    return None if eps is None or float(eps) > 0 else "its eps is not positive"


def _group_refusal(call: Call) -> str | None:
    any_size = call.rank() in (3, 4) and is_fixed(call.shape()[1])
    return None if any_size else _FIXED(call)


def _statistics_refusal(call: Call) -> str | None:
    if not call.args.get("use_input_stats", True):
        return "it normalises by fixed statistics"
    if call.args.get("running_mean") is not None or call.args.get("running_var") is not None:
        return "it updates statistics"
    return None


def _single_refusal(call: Call) -> str | None:
    """Refuse batches: a decomposed instance norm has the batch merged into the channels."""
    single = call.rank() > 1 and is_one(call.shape()[0])
    return None if single else "it normalises over a batch"


_REASON = "it normalises over a symbolic size"
_FIXED = fixed(lambda call: call.shape()[1:], _REASON)
_AFFINE = constants("weight", "bias")
_LAYER = first_of(fixed(_folded, _REASON), _folded_refusal)
NORMALIZATION: Table = table(
    {
        "layer_norm native_layer_norm": function(_layer_norm, _LAYER, wide=True),
        "rms_norm": function(_rms_norm, _eps_refusal, _LAYER, wide=True),
        "group_norm native_group_norm": function(_group_norm, _group_refusal, _AFFINE, wide=True),
        "instance_norm": function(_instance_norm, _statistics_refusal, _FIXED, _AFFINE, wide=True),
        "_native_batch_norm_legit.no_stats": function(
            _instance_norm, _single_refusal, _FIXED, _AFFINE, wide=True
        ),
    }
)
