"""Integer weights of linear layers and convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import fx

from lowerdeck.serializer import XnnDatatype, XnnEncoding, XnnNode, XnnOperator
from lowerdeck.xnnpack.emit import Emission, Quantized, Scratch, Tracked, shape_of
from lowerdeck.xnnpack.operators.contract import FloatNeededError
from lowerdeck.xnnpack.operators.quantization import reads_rounded_rows
from lowerdeck.xnnpack.operators.results import following_clamp
from lowerdeck.xnnpack.payload import FLOAT, PER_ROW, Layout, int8

MOST_COARSE = 256
"""Ratio of input scale * filter scale to result scale from which the runtime rejects a layer."""
_INT32 = 2**31 - 1


class Filters(NamedTuple):
    """Quantised filters of a layer, in memory order.

    Attributes:
        data: The integers, with zero point 0.
        scales: One scale, or one per output channel.
        channel_dim: The dimension of the output channels in ``data``.
        bits: 4 if the integers may be packed in half bytes, else 8.
    """

    data: torch.Tensor
    scales: torch.Tensor
    channel_dim: int
    bits: int = 8

    @property
    def channels(self) -> int:
        """Number of output channels."""
        return int(self.data.shape[self.channel_dim])


def store_static(
    emission: Emission, filters: Filters, bias: torch.Tensor | None, source: XnnEncoding
) -> tuple[int, int]:
    """Return the ids of filters and bias for a statically quantised layer.

    Args:
        emission: Receives the constants; ``writes`` is the encoding of the result.
        bias: The bias in float.
        source: Encoding of the input.

    Raises:
        FloatNeededError: The runtime cannot rescale the sums to the result's scale, or the bias
            exceeds int32.
    """
    products = filters.scales.double() * source.scale
    if bool((products / emission.writes.scale >= MOST_COARSE).any()):
        raise FloatNeededError(f"its sums are {MOST_COARSE} or more times coarser than its result")
    single = filters.scales.numel() == 1 and filters.bits == 8
    sums = None
    if bias is not None:
        sums = (bias.reshape(-1).float().double() / products).round()
        if bool((sums.abs() > _INT32).any()) or not bool(torch.isfinite(sums).all()):
            raise FloatNeededError("its bias overflows int32 at the scale of its sums")
    filter_id = (
        emission.stored_constant(filters.data, int8(float(filters.scales)), packed=True)
        if single
        else store_channels(emission, filters)
    )
    if sums is None:
        return filter_id, XnnNode.NONE
    scale = float(products[0])
    # The runtime computes the scale of the bias from input and filter, but checks this one.
    encoding = XnnEncoding(XnnDatatype.QINT32, (max(scale, _TINY),))
    if not single:
        steps = products.float().expand(filters.channels).clamp(min=_TINY).contiguous()
        encoding = _per_channel(emission, XnnDatatype.QCINT32, steps, 0)
    return filter_id, emission.stored_constant(sums.to(torch.int32), encoding, packed=True)


_TINY = torch.finfo(torch.float32).tiny


def store_channels(emission: Emission, filters: Filters) -> int:
    """Return the id of filters with per-channel scales, in half bytes if they fit."""
    scales = filters.scales.float().expand(filters.channels).contiguous()
    four = filters.bits == 4 and filters.data.shape[-1] % 2 == 0
    kind = XnnDatatype.QCINT4 if four else XnnDatatype.QCINT8
    encoding = _per_channel(emission, kind, scales, filters.channel_dim)
    stored = half_bytes(emission.scratch, filters.data) if four else filters.data
    return emission.stored_constant(stored, encoding, packed=True, dims=filters.data.shape)


def store_groups(emission: Emission, weight: Quantized) -> int:
    """Return the id of a matrix of half bytes with a scale for each group of a row."""
    stored = weight.scales.to(torch.bfloat16).contiguous()
    encoding = XnnEncoding(
        XnnDatatype.QBINT4,
        group_size=weight.group,
        scale_constant=emission.data_constant(stored),
    )
    data = half_bytes(emission.scratch, weight.data)
    return emission.stored_constant(data, encoding, packed=True, dims=weight.data.shape)


def _per_channel(
    emission: Emission, kind: XnnDatatype, scales: torch.Tensor, channel_dim: int
) -> XnnEncoding:
    constant = emission.data_constant(scales)
    return XnnEncoding(kind, channel_dim=channel_dim, scale_constant=constant)


def half_bytes(scratch: Scratch, data: torch.Tensor) -> torch.Tensor:
    """Pack integers of -8..7 in half bytes, the first in the low half, with 8 added.

    Args:
        data: The integers as int8, an even number in each row.
    """

    def halved(piece: torch.Tensor) -> torch.Tensor:
        moved = (piece + 8).view(torch.uint8)
        return moved[0::2] | (moved[1::2] << 4)

    return scratch.create(data, torch.uint8, halved, width=2)


def output_scales(weight: Quantized, axis: int, repeats: int) -> torch.Tensor:
    """Return the scales of output channels.

    Args:
        weight: The weight of a convolution, with dimensions in torch's order.
        axis: The dimension of output channels.
        repeats: Number of groups, each with the channels of that dimension.

    Raises:
        FloatNeededError: The scales are per group, or along another dimension.
    """
    if weight.group or weight.axis not in (None, axis):
        raise FloatNeededError("its weight's scales are not per output channel")
    return weight.scales if weight.axis is None else weight.scales.repeat(repeats)


def symmetric(weight: Quantized) -> Quantized:
    """Return a weight with zero points of 0, as the runtime requires.

    Raises:
        FloatNeededError: The weight cannot have zero points of 0.
    """
    centred = weight.centred()
    if centred is None:
        raise FloatNeededError("its weight's zero points are not 0")
    return centred


_GROUP_STEP = 32
"""Group sizes must be multiples of this."""


def quantized_linear(
    emission: Emission, node: fx.Node, source: fx.Node, weight: Quantized, bias: fx.Node | None
) -> None:
    """Add a linear layer whose weight is constant integers.

    Args:
        weight: One row for each output.
        bias: A constant.

    Raises:
        FloatNeededError: The runtime does not support the weight; nothing was added.
    """
    tensor = None if bias is None else emission.constant(bias).reshape(-1).float()
    rows = emission.of(source)
    if emission.writes.is_int8:
        filter_id, bias_id = store_static(emission, _matrix(weight), tensor, rows.encoding)
        _add(emission, node, emission.id_of(rows), [filter_id], bias_id)
        return
    # float16 inputs are converted to float32, which supports all kinds of weights.
    with emission.stored(FLOAT, FLOAT):
        operands = _dynamic if reads_rounded_rows(node) else _weight_only
        _add(emission, node, *operands(emission, rows, weight, tensor))


def group_refusal(group: int, bits: int, *, rounds: bool) -> str | None:
    """Return why the runtime cannot multiply a weight with such groups, or None.

    Args:
        group: Group size; 0 for per-channel scales.
        rounds: Whether the input is dynamically quantised.
    """
    if group and not rounds:
        return (
            "its weight has groups, which the runtime multiplies only with inputs that are "
            "quantised at run time"
        )
    if group and (bits != 4 or group % _GROUP_STEP):
        return (
            f"its weight has groups of {group} with {bits} bits; the runtime supports 4 bits, in "
            f"groups of a multiple of {_GROUP_STEP}"
        )
    return None


def _check_groups(weight: Quantized, *, rounds: bool) -> None:
    reason = group_refusal(weight.group, weight.bits, rounds=rounds)
    if reason is not None:
        raise FloatNeededError(reason)


def _matrix(weight: Quantized) -> Filters:
    _check_groups(weight, rounds=False)
    if weight.axis not in (None, 0):
        raise FloatNeededError("its weight's scales are not per output channel")
    quantized = symmetric(weight)
    return Filters(quantized.data, quantized.scales, 0, quantized.bits)


def _dynamic(
    emission: Emission, source: Tracked, weight: Quantized, bias: torch.Tensor | None
) -> tuple[int, list[int], int]:
    if weight.group:
        _check_groups(weight, rounds=True)
        filters = [store_groups(emission, summand) for summand in weight.summands()]
    else:
        # The runtime has no weight zero points: a weight that does not fit into 8 bits without
        # them is split into a sum of weights that do.
        matrices = [_matrix(summand) for summand in weight.summands()]
        if weight.data.shape[1] % 2 and any(matrix.bits == 4 for matrix in matrices):
            # The runtime is silently wrong on odd widths; a zero column changes neither sums nor
            # ranges.
            none = (0,) * (len(source.shape) - 1)
            source = emission.padded(emission.plain(source), (*none, 0), (*none, 1))
            matrices = [
                matrix._replace(data=torch.nn.functional.pad(matrix.data, (0, 1)))
                for matrix in matrices
            ]
        filters = [store_channels(emission, matrix) for matrix in matrices]
    value = emission.dynamic(emission.id_of(source), source.shape, Layout.PLAIN, PER_ROW)
    return value, filters, emission.packed(bias, FLOAT)


def _weight_only(
    emission: Emission, source: Tracked, weight: Quantized, bias: torch.Tensor | None
) -> tuple[int, list[int], int]:
    filters = _matrix(weight)
    if bias is not None:
        # The runtime also multiplies the bias by the channel's scale.
        bias = (bias.double() / filters.scales.double().expand(filters.channels)).float()
        if not bool(torch.isfinite(bias).all()):
            raise FloatNeededError("its bias is too large relative to its weight's scales")
    filter_id = store_channels(emission, filters)
    return emission.id_of(source), [filter_id], emission.packed(bias, FLOAT)


def _add(
    emission: Emission, node: fx.Node, value: int, filters: Sequence[int], bias_id: int
) -> None:
    """Add one layer per filter, and sum their results."""
    last, limits = following_clamp(node)
    shape, result = shape_of(last), None
    for number, filter_id in enumerate(filters):
        ids = filter_id, XnnNode.NONE if number else bias_id
        product = emission.layer(value, shape, ids, limits if len(filters) == 1 else None)
        ends = limits if number == len(filters) - 1 else None
        result = result and emission.binary(XnnOperator.ADD, result, product, ends, shape=shape)
        result = result or product
    assert result is not None
    emission.define(last, result)
