"""Dequantise arguments and constants, and quantise results: the runtime computes in float32."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lowerdeck.serializer import XnnConstant, XnnDatatype, XnnGraph, XnnNode, XnnOperator, XnnValue
from lowerdeck.torch_base import view_tensor
from lowerdeck.xnnpack.errors import BlobError

Named = Mapping[str, memoryview]
_STORED = {
    XnnDatatype.FP32: torch.float32,
    XnnDatatype.FP16: torch.float16,
    XnnDatatype.BF16: torch.bfloat16,
    XnnDatatype.QINT8: torch.int8,
    XnnDatatype.QCINT8: torch.int8,
    XnnDatatype.QINT32: torch.int32,
    XnnDatatype.QCINT32: torch.int32,
    XnnDatatype.QCINT4: torch.uint8,
    XnnDatatype.QBINT4: torch.uint8,
}
"""dtype of the stored bytes of each constant datatype."""
COMPUTED = frozenset({*_STORED, XnnDatatype.QDINT8})
"""Datatypes that this runtime supports."""
PROGRAM_DTYPES = {
    kind: _STORED[kind]
    for kind in (XnnDatatype.FP32, XnnDatatype.FP16, XnnDatatype.BF16, XnnDatatype.QINT8)
}
"""dtype of the program's tensor for each argument datatype."""
_FOUR_BITS = (XnnDatatype.QCINT4, XnnDatatype.QBINT4)
_LEAST, _MOST = -128, 127


def dequantized_constant(graph: XnnGraph, value: XnnValue, named: Named) -> torch.Tensor:
    """Return a dequantised constant in float32; an integer bias stays integer.

    Args:
        value: A constant value.
        named: The file's named data.

    Raises:
        BlobError: The data are missing or have the wrong size.
    """
    assert value.constant is not None
    data = _data(graph, value.constant, named)
    dtype = _STORED[value.dtype]
    try:
        if value.dtype in _FOUR_BITS:
            count = torch.Size(value.shape).numel()
            halves = view_tensor(data, dtype, (-(-count // 2),)).to(torch.int16)
            nibbles = torch.stack([halves & 15, halves >> 4], 1).reshape(-1)[:count] - 8
            stored = nibbles.reshape(value.shape)
        else:
            stored = view_tensor(data, dtype, value.shape)
    except ValueError as error:
        raise BlobError(f"the constant {value.id}: {error}") from error
    if not value.encoding.scheme:
        return stored.float()
    return stored if dtype is torch.int32 else _dequantize(graph, value, stored, named)


def _dequantize(
    graph: XnnGraph, value: XnnValue, stored: torch.Tensor, named: Named
) -> torch.Tensor:
    encoding = value.encoding
    if encoding.scheme == "tensor":
        return (stored.float() - encoding.zero_point) * encoding.scale
    scales = _scales(graph, value, named)
    if encoding.scheme == "group":
        rows, width = value.shape
        row_scales = scales.reshape(rows, -1).repeat_interleave(encoding.group_size, 1)
        return stored.float() * row_scales[:, :width]
    sizes = [1] * len(value.shape)
    sizes[encoding.channel_dim] = -1
    return stored.float() * scales.reshape(sizes)


def _scales(graph: XnnGraph, value: XnnValue, named: Named) -> torch.Tensor:
    encoding = value.encoding
    if encoding.scale_constant is None:
        return torch.tensor(encoding.scales)
    data = _data(graph, encoding.scale_constant, named)
    dtype = torch.bfloat16 if encoding.scheme == "group" else torch.float32
    try:
        return view_tensor(data, dtype, (len(data) // dtype.itemsize,)).float()
    except ValueError as error:
        raise BlobError(f"the scales of the constant {value.id}: {error}") from error


def _data(graph: XnnGraph, constant: XnnConstant, named: Named) -> memoryview:
    if constant.key is None:
        return graph.constant_data[constant.offset : constant.offset + constant.size]
    if constant.key not in named:
        raise BlobError(
            f"the named data has no entry {constant.key}: load the blob together with its file "
            "and the file's .ptd"
        )
    return named[constant.key]


def channel_scales(graph: XnnGraph, value: XnnValue, named: Named) -> torch.Tensor | None:
    """Return a filter's scale, or its per-channel scales; None for float or grouped filters."""
    if value.encoding.scheme == "tensor":
        return torch.tensor(value.encoding.scale)
    return _scales(graph, value, named) if value.encoding.scheme == "channel" else None


def dequantized(tensor: torch.Tensor, value: XnnValue) -> torch.Tensor:
    """Return a dequantised argument of a call in float32."""
    encoding = value.encoding
    return (
        (tensor.float() - encoding.zero_point) * encoding.scale
        if encoding.scheme
        else tensor.float()
    )


def quantized(numbers: torch.Tensor, value: XnnValue) -> torch.Tensor:
    """Return float32 numbers in the program's dtype, quantised if the value is."""
    encoding = value.encoding
    if not encoding.scheme:
        return numbers.to(PROGRAM_DTYPES[value.dtype])
    integers = (numbers / encoding.scale).round() + encoding.zero_point
    return integers.clamp(_LEAST, _MOST).to(torch.int8)


def fake_quantized(numbers: torch.Tensor, value: XnnValue) -> torch.Tensor:
    """Return a node's result, rounded as stored in a quantised or float16 value.

    Returns:
        The nearest numbers in the value's datatype and scale, in float32.
    """
    if value.dtype is XnnDatatype.FP32:
        return numbers
    if value.dtype is XnnDatatype.QDINT8:
        return _dynamically_fake_quantized(numbers, value.encoding.nonbatch_dims)
    if not value.encoding.scheme:
        return numbers.to(PROGRAM_DTYPES[value.dtype]).float()
    # The runtime quantises NaN to the largest integer.
    without_nan = numbers.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    return dequantized(quantized(without_nan, value), value)


def _dynamically_fake_quantized(numbers: torch.Tensor, dims: int) -> torch.Tensor:
    axes = list(range(numbers.dim() - max(dims, 1), numbers.dim()))
    low = numbers.amin(axes, keepdim=True).clamp(max=0)
    high = numbers.amax(axes, keepdim=True).clamp(min=0)
    scale = (high - low) / 255
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    zero = (_LEAST - low / scale).round().clamp(_LEAST, _MOST)
    integers = ((numbers / scale).round() + zero).clamp(_LEAST, _MOST)
    return (integers - zero) * scale


def bias_factor(
    node: XnnNode, values: Mapping[int, XnnValue], graph: XnnGraph, named: Named
) -> torch.Tensor | None:
    """Return the factor by which the runtime multiplies a layer's bias, or None.

    The unit of an integer bias is the input's scale times the filter's. If input and bias are
    float and the filter is integer, the runtime also multiplies the bias by the filter's scales;
    compilers divide by them in advance.
    """
    if node.operator not in _LAYERS or len(node.inputs) < 3:
        return None
    source, filters, bias = (values[value_id] for value_id in node.inputs[:3])
    scales = channel_scales(graph, filters, named) if filters.constant is not None else None
    if scales is None:
        return None
    if bias.dtype in (XnnDatatype.QINT32, XnnDatatype.QCINT32):
        return scales * source.encoding.scale
    return scales if source.dtype is XnnDatatype.FP32 else None


_LAYERS = frozenset(
    {
        *(XnnOperator.FULLY_CONNECTED, XnnOperator.CONV2D),
        *(XnnOperator.DEPTHWISE_CONV2D, XnnOperator.CONV_TRANSPOSE_2D),
    }
)
