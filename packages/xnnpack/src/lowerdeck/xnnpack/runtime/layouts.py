"""Infer which payload values have the channels-last layout."""

from __future__ import annotations

from collections.abc import Collection

from lowerdeck.serializer import XnnGraph, XnnNode, XnnOperator
from lowerdeck.xnnpack.payload import Layout, conversion

_CHANNELS_LAST_RESULTS = frozenset(
    {
        *(XnnOperator.CONV2D, XnnOperator.DEPTHWISE_CONV2D, XnnOperator.CONV_TRANSPOSE_2D),
        *(
            XnnOperator.MAX_POOLING_2D,
            XnnOperator.AVG_POOLING_2D,
            XnnOperator.GLOBAL_AVG_POOLING_2D,
        ),
        XnnOperator.STATIC_RESIZE_BILINEAR_2D,
    }
)
_PLAIN_RESULTS = frozenset(
    {XnnOperator.STATIC_RESHAPE, XnnOperator.FULLY_CONNECTED, XnnOperator.BATCH_MATRIX_MULTIPLY}
)


def channels_last_values(graph: XnnGraph, arguments: Collection[int]) -> frozenset[int]:
    """Return the ids of the values with the channels-last layout.

    Payloads do not record layouts, so they are inferred from the operators. A transpose of the
    model with the permutation of a layout conversion is mistaken for one.

    Args:
        arguments: Positions of the channels-last arguments.
    """
    channels_last = {value.id for value in graph.values if value.external_id in arguments}
    for node in graph.nodes:
        if _is_channels_last(node, channels_last):
            channels_last.update(node.outputs)
    return frozenset(channels_last)


def _is_channels_last(node: XnnNode, channels_last: Collection[int]) -> bool:
    if node.operator in _CHANNELS_LAST_RESULTS:
        return True
    if node.operator in _PLAIN_RESULTS:
        return False
    has_channels_last_input = any(source in channels_last for source in node.inputs)
    permutation = node.parameters.get("perm")
    if isinstance(permutation, tuple):
        from_plain = conversion(len(permutation), Layout.CHANNELS_LAST)
        is_conversion = len(permutation) > 3 and tuple(permutation) == from_plain
        return is_conversion and not has_channels_last_input
    return has_channels_last_input
