"""Infer which payload values have the channels-last layout."""

from __future__ import annotations

from collections.abc import Collection

from lowerdeck.serializer import XnnGraph, XnnNode, XnnOperator
from lowerdeck.xnnpack.payload import Layout, conversion

_MAKES_IMAGES = frozenset(
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
_MAKES_NONE = frozenset(
    {XnnOperator.STATIC_RESHAPE, XnnOperator.FULLY_CONNECTED, XnnOperator.BATCH_MATRIX_MULTIPLY}
)


def images(graph: XnnGraph, channels_last: Collection[int]) -> frozenset[int]:
    """Return the ids of the values with the channels-last layout.

    Payloads do not record layouts: convolutions and pools produce images, transpositions convert
    the layout, other operators keep it. A transposition of the model with the same permutation is
    mistaken for a conversion; the result is used in reports only.

    Args:
        channels_last: Positions of the channels-last arguments.
    """
    image_ids = {value.id for value in graph.values if value.external_id in channels_last}
    for node in graph.nodes:
        if _makes_image(node, image_ids):
            image_ids.update(node.outputs)
    return frozenset(image_ids)


def _makes_image(node: XnnNode, images: Collection[int]) -> bool:
    if node.operator in _MAKES_IMAGES:
        return True
    if node.operator in _MAKES_NONE:
        return False
    turned = any(source in images for source in node.inputs)
    permutation = node.parameters.get("perm")
    if isinstance(permutation, tuple):
        to_image = conversion(len(permutation), Layout.CHANNELS_LAST)
        return not turned and len(permutation) > 3 and tuple(permutation) == to_image
    return turned
