"""What the elements of a value are, and how stored integers become real numbers."""

from __future__ import annotations

from dataclasses import dataclass

from lowerdeck.serializer import XnnDatatype


@dataclass(frozen=True, slots=True)
class Encoding:
    """The type of a value's elements.

    Attributes:
        datatype: What one element is.
        scale: Real distance of two neighbouring integers, where one holds for the whole tensor.
        zero_point: The integer that stands for 0, likewise.
        scales: Number of the constant that holds a scale for each channel or group, else 0.
        count: How many scales that constant holds.
        channel_dim: The dimension of memory that the channels are.
        group_size: How many elements share a scale of a group.
        nonbatch_dims: How many of the last dimensions share a scale that is found at run time.
    """

    datatype: XnnDatatype
    scale: float = 0.0
    zero_point: int = 0
    scales: int = 0
    count: int = 0
    channel_dim: int = 0
    group_size: int = 0
    nonbatch_dims: int = 0

    @property
    def is_int8(self) -> bool:
        """Whether it is an 8-bit integer with one scale, known ahead of time."""
        return self.datatype is XnnDatatype.QINT8


FLOAT = Encoding(XnnDatatype.FP32)
HALF = Encoding(XnnDatatype.FP16)
BFLOAT = Encoding(XnnDatatype.BF16)
PER_ROW = Encoding(XnnDatatype.QDINT8, nonbatch_dims=1)
"""Quantised at run time, each row by itself, whatever else the table says."""
PER_IMAGE = Encoding(XnnDatatype.QDINT8, nonbatch_dims=3)
"""The same for what a convolution reads: 1 gives garbage there, and 4 is refused."""


def int8(scale: float, zero_point: int = 0) -> Encoding:
    """Return the encoding of a tensor of 8-bit integers with one scale."""
    return Encoding(XnnDatatype.QINT8, scale=scale, zero_point=zero_point)


TRUTH = int8(1.0)
"""The bytes of a tensor of bool, which the runtime takes as the integers 0 and 1 that they are."""
