"""Integer weights as linear layers and convolutions want them, beside every kind of input."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lowerdeck.serializer import XnnDatatype, XnnEncoding, XnnNode
from lowerdeck.xnnpack.emit import Emission, Quantized, Scratch
from lowerdeck.xnnpack.operators.contract import FloatNeededError
from lowerdeck.xnnpack.payload.encoding import int8

MOST_COARSE = 256
"""From this ratio of input times filter to result on, the runtime refuses the layer."""
_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Filters:
    """Integer filters in the order of memory.

    Attributes:
        data: The integers; 0 stands for 0.
        scales: One, or one for each output channel.
        channel_dim: Which dimension of ``data`` the output channels are.
        bits: 4 where the integers may be stored in half bytes, else 8.
    """

    data: torch.Tensor
    scales: torch.Tensor
    channel_dim: int
    bits: int = 8

    @property
    def channels(self) -> int:
        """How many output channels there are."""
        return int(self.data.shape[self.channel_dim])


def store_static(
    emission: Emission, filters: Filters, bias: torch.Tensor | None, source: XnnEncoding
) -> tuple[int, int]:
    """Return filters and bias for an input and a result of 8-bit integers.

    Args:
        emission: Where to add; its ``writes`` is how the result is stored.
        filters: The filters.
        bias: The bias as real numbers.
        source: How the input is stored.

    Raises:
        FloatNeededError: The runtime cannot rescale sums to the result, or hold the bias.
    """
    products = filters.scales.double() * source.scale
    if bool((products / emission.writes.scale >= MOST_COARSE).any()):
        raise FloatNeededError(f"its sums are {MOST_COARSE} or more times coarser than its result")
    single = filters.scales.numel() == 1 and filters.bits == 8
    sums = None
    if bias is not None:
        sums = (bias.reshape(-1).float().double() / products).round()
        if bool((sums.abs() > _INT32).any()) or not bool(torch.isfinite(sums).all()):
            raise FloatNeededError("its bias is beyond the integers of its sums")
    filter_id = (
        emission.stored_constant(filters.data, int8(float(filters.scales)), packed=True)
        if single
        else store_channels(emission, filters)
    )
    if sums is None:
        return filter_id, XnnNode.NONE
    scale = float(products[0])
    encoding = XnnEncoding(XnnDatatype.QINT32, (_plain(scale),))
    if not single:
        each = products.float().expand(filters.channels).clamp(min=_TINY).contiguous()
        encoding = _per_channel(emission, XnnDatatype.QCINT32, each, 0)
    return filter_id, emission.stored_constant(sums.to(torch.int32), encoding, packed=True)


_TINY = torch.finfo(torch.float32).tiny


def _plain(scale: float) -> float:
    # The runtime computes a bias's scale from those of input and filter, but checks this one.
    return max(scale, _TINY)


def store_channels(emission: Emission, filters: Filters) -> int:
    """Return filters with a scale for each channel, in half bytes where they fit."""
    scales = filters.scales.float().expand(filters.channels).contiguous()
    four = filters.bits == 4 and filters.data.shape[-1] % 2 == 0
    kind = XnnDatatype.QCINT4 if four else XnnDatatype.QCINT8
    encoding = _per_channel(emission, kind, scales, filters.channel_dim)
    stored = half_bytes(emission.scratch, filters.data) if four else filters.data
    return emission.stored_constant(stored, encoding, packed=True, dims=filters.data.shape)


def store_groups(emission: Emission, weight: Quantized) -> int:
    """Return a matrix of half bytes with a scale for each group of a row."""
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
    """Return integers of -8..7 two in a byte, the first in the low half, moved up by 8.

    Args:
        scratch: Makes what is returned.
        data: The integers as int8, an even number in each row.
    """

    def halved(piece: torch.Tensor) -> torch.Tensor:
        moved = (piece + 8).view(torch.uint8)
        return moved[0::2] | (moved[1::2] << 4)

    return scratch.made(data, torch.uint8, halved, width=2)


def output_scales(weight: Quantized, axis: int, repeats: int) -> torch.Tensor:
    """Return the scales of output channels.

    Args:
        weight: The weight of a convolution, as torch orders its dimensions.
        axis: Its dimension of output channels.
        repeats: How many groups use the channels of that dimension again.

    Raises:
        FloatNeededError: The scales run along another dimension.
    """
    if weight.group or weight.axis not in (None, axis):
        raise FloatNeededError("its weight's scales run along another dimension than its outputs")
    return weight.scales if weight.axis is None else weight.scales.repeat(repeats)


def symmetric(weight: Quantized) -> Quantized:
    """Return a weight with zero points of 0, which are all that the runtime knows.

    Raises:
        FloatNeededError: It has others, and without them it does not fit into 8 bits.
    """
    found = weight.centred()
    if found is None:
        raise FloatNeededError("its weight's zero points are not 0")
    return found
