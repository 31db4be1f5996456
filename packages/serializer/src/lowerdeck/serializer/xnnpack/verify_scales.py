"""Whether the integers of an XNNPACK graph become the numbers that they should.

Each rule was seen in the runtime of ExecuTorch 1.4.1: it refuses the scales that are none, and
on the combinations of operands below it loads and computes garbage without a word.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from lowerdeck.serializer.xnnpack.graph import XnnEncoding, XnnGraph, XnnNode, XnnValue
from lowerdeck.serializer.xnnpack.operators import XnnDatatype, XnnOperator
from lowerdeck.serializer.xnnpack.verify_nodes import damaged

_ZERO_POINTS = {
    XnnDatatype.QINT8: (-128, 127),
    XnnDatatype.QUINT8: (0, 255),
    XnnDatatype.QINT32: (0, 0),
}
_LEAST_SCALE = 2.0**-126
"""Below it a float is denormal."""
_MOST_RESCALED = 128
_IMAGE_DIMS = 3
_LAYERS = ("FullyConnected", "Convolution")


def verify_scales(graph: XnnGraph, values: Mapping[int, XnnValue]) -> None:
    """Check how integers are stored, and what reads them.

    Args:
        graph: The graph, whose nodes refer to values that are there.
        values: Its values by their ids.

    Raises:
        FormatError: The runtime refuses a scale, or computes nonsense with it.
    """
    for value in graph.values:
        _verify_scheme(value)
    makers = {made: node for node in graph.nodes for made in node.outputs}
    for node in graph.nodes:
        if node.operator in (XnnOperator.CONVERT, XnnOperator.LEAKY_RELU):
            _verify_ratio(node, values)
        elif node.operator.table in _LAYERS:
            _verify_layer(node, values, makers)


def _verify_scheme(value: XnnValue) -> None:
    what = f"XNNPACK value {value.id} of {value.dtype.name}"
    how = value.encoding
    if value.dtype is XnnDatatype.QDINT8 and (value.constant or value.external_id is not None):
        raise damaged(f"found {what} as a constant or argument, which exists at run time only")
    if value.dtype in _ZERO_POINTS:
        low, high = _ZERO_POINTS[value.dtype]
        if not low <= how.zero_point <= high:
            raise damaged(
                f"found the zero point {how.zero_point} of {what}, expected {low} to {high}"
            )
    wrong = [one for one in how.scales if not (math.isfinite(one) and one >= _LEAST_SCALE)]
    if wrong:
        raise damaged(f"found the scale {wrong[0]} of {what}, expected a positive, normal number")


def _tensor_scale(value: XnnValue) -> XnnEncoding | None:
    return value.encoding if value.encoding.scheme == "tensor" else None


def _verify_ratio(node: XnnNode, values: Mapping[int, XnnValue]) -> None:
    source, result = (_tensor_scale(values[one]) for one in (node.inputs[0], node.outputs[0]))
    if source is None or result is None:
        return
    slope = node.fields.get("negative_slope", 1.0)
    steepest = max(1.0, abs(slope)) if isinstance(slope, float) else 1.0
    ratio = source.scale * steepest / result.scale
    if ratio > _MOST_RESCALED:
        raise damaged(
            f"found a {node.operator.label} whose input is {ratio:.0f} times coarser than its "
            f"result, expected at most {_MOST_RESCALED}: the runtime's result is garbage"
        )


def _verify_layer(
    node: XnnNode, values: Mapping[int, XnnValue], makers: Mapping[int, XnnNode]
) -> None:
    label = node.operator.label
    source, filters, *more = (values[number] for number in node.inputs)
    how = _tensor_scale(filters)
    if filters.dtype is XnnDatatype.QINT8 and how is not None and how.zero_point:
        raise damaged(
            f"found the zero point {how.zero_point} of the filter of {label}, expected 0: the "
            "runtime computes as if it were"
        )
    if source.dtype is XnnDatatype.QDINT8:
        _verify_dynamic(node, source, filters, values, makers)
    floats = (source.dtype, filters.dtype) == (XnnDatatype.FP32, XnnDatatype.FP16)
    image = node.operator in (XnnOperator.CONV2D, XnnOperator.CONV_TRANSPOSE_2D)
    kept = node.number("flags") & XnnNode.FLOAT_BIAS
    if floats and image and not kept and any(one.dtype is XnnDatatype.FP32 for one in more):
        raise damaged(
            f"found a {label} of floats by halves with a bias of floats, expected one of halves: "
            "the runtime's result is garbage"
        )


def _verify_dynamic(
    node: XnnNode,
    source: XnnValue,
    filters: XnnValue,
    values: Mapping[int, XnnValue],
    makers: Mapping[int, XnnNode],
) -> None:
    label = node.operator.label
    is_linear = node.operator.table == "FullyConnected"
    dims = source.encoding.nonbatch_dims
    if not is_linear and dims != _IMAGE_DIMS:
        raise damaged(
            f"found an input of {label} that is quantised along {dims} dimensions at run "
            f"time, expected {_IMAGE_DIMS}: the runtime's result is garbage"
        )
    if is_linear and filters.dtype is XnnDatatype.QCINT4 and len(filters.shape) > 1:
        width = filters.shape[0 if node.number("flags") & XnnNode.TRANSPOSE_WEIGHTS else 1]
        if width % 2:
            raise damaged(
                f"found a filter of 4 bits of {label} with {width} inputs, expected an even "
                "number: the runtime's result is wrong"
            )
    maker = makers.get(source.id)
    given = None if maker is None or not maker.inputs else values[maker.inputs[0]]
    result = values[node.outputs[0]]
    if given is not None and given.dtype is not result.dtype:
        raise damaged(
            f"found a {label} that makes {result.dtype.name} of quantised {given.dtype.name}, "
            "expected the same: the runtime's result is garbage"
        )
