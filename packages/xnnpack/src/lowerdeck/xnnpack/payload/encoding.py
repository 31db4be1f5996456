"""The encodings of elements that programs are compiled to."""

from __future__ import annotations

from lowerdeck.serializer import XnnDatatype, XnnEncoding

FLOAT = XnnEncoding(XnnDatatype.FP32)
HALF = XnnEncoding(XnnDatatype.FP16)
BFLOAT = XnnEncoding(XnnDatatype.BF16)
PER_ROW = XnnEncoding(XnnDatatype.QDINT8, nonbatch_dims=1)
"""Quantised at run time, each row by itself, whatever else the table says."""
PER_IMAGE = XnnEncoding(XnnDatatype.QDINT8, nonbatch_dims=3)
"""The same for what a convolution reads: 1 gives garbage there, and 4 is refused."""


def int8(scale: float, zero_point: int = 0) -> XnnEncoding:
    """Return the encoding of a tensor of 8-bit integers with one scale."""
    return XnnEncoding(XnnDatatype.QINT8, (scale,), zero_point)


TRUTH = int8(1.0)
"""The bytes of a tensor of bool, which the runtime takes as the integers 0 and 1 that they are."""
