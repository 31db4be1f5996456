"""Encodings and memory layouts of payload values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import TypeVar

import torch

from lowerdeck.serializer import XnnDatatype, XnnEncoding
from lowerdeck.torch_base import is_channels_last

FLOAT = XnnEncoding(XnnDatatype.FP32)
HALF = XnnEncoding(XnnDatatype.FP16)
BFLOAT = XnnEncoding(XnnDatatype.BF16)
PER_ROW = XnnEncoding(XnnDatatype.QDINT8, nonbatch_dims=1)
"""Dynamically quantised per row."""
PER_IMAGE = XnnEncoding(XnnDatatype.QDINT8, nonbatch_dims=3)
"""Dynamically quantised input of a convolution; with other fields the runtime returns garbage or
refuses the payload.
"""


def int8(scale: float, zero_point: int = 0) -> XnnEncoding:
    """Return the encoding of a tensor of 8-bit integers with one scale."""
    return XnnEncoding(XnnDatatype.QINT8, (scale,), zero_point)


TRUTH = int8(1.0)
"""Encoding of bool tensors, whose bytes are the integers 0 and 1."""

T = TypeVar("T")


class Layout(Enum):
    """Order of a value's dimensions in memory."""

    PLAIN = 0
    """torch's order: N, C, H, W."""
    CHANNELS_LAST = 1
    """Order of XNNPACK's convolutions and pools: N, H, W, C."""
    __hash__ = object.__hash__  # Enum's is Python code.

    def permutation(self, rank: int) -> tuple[int, ...]:
        """Return torch's dimension for each memory dimension, outermost first."""
        return self.arrange(range(rank))

    def arrange(self, sizes: Sequence[T]) -> tuple[T, ...]:
        """Return per-dimension values, given in torch's order, in memory order."""
        if self is Layout.PLAIN or len(sizes) < 3:
            return tuple(sizes)
        return (sizes[0], *sizes[2:], sizes[1])

    def position(self, axis: int, rank: int) -> int:
        """Return the position in memory of one of torch's dimensions."""
        return self.permutation(rank).index(axis)


LAYOUT_MARK = " channels_last"
"""Part of a payload's version string, before the positions of channels-last arguments. The
official runtime ignores the version and reads layouts from the program's tensors.
"""


def layout_text(channels_last: Iterable[int]) -> str:
    """Return a payload's version string with the positions of channels-last arguments."""
    positions = "".join(f" {position}" for position in sorted(channels_last))
    return f"0{LAYOUT_MARK}{positions}" if positions else "0"


def layout_of(tensor: torch.Tensor) -> Layout:
    """Return the layout of a partition's input or output, given its fake tensor."""
    return Layout.CHANNELS_LAST if is_channels_last(tensor) else Layout.PLAIN


def conversion(rank: int, target: Layout) -> tuple[int, ...]:
    """Return the permutation of memory that turns the other layout into ``target``."""
    if target is Layout.CHANNELS_LAST:
        return Layout.CHANNELS_LAST.permutation(rank)
    return tuple(Layout.CHANNELS_LAST.position(axis, rank) for axis in range(rank))
