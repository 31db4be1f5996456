"""Values of a payload that are images, whose dimensions have XNNPACK's order."""

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
    """Return the ids of the values that lie with channels last.

    A payload does not say it: convolutions and pools make images, transpositions turn them, and
    all else leaves them as they are. A transposition of the model's own that looks like a turn
    is taken for one; the order is for reports only, not for what is computed.

    Args:
        channels_last: Positions of the arguments that the program holds with channels last.
    """
    found = {value.id for value in graph.values if value.external_id in channels_last}
    for node in graph.nodes:
        if _makes_image(node, found):
            found.update(node.outputs)
    return frozenset(found)


def _makes_image(node: XnnNode, known: Collection[int]) -> bool:
    if node.operator in _MAKES_IMAGES:
        return True
    if node.operator in _MAKES_NONE:
        return False
    turned = any(one in known for one in node.inputs)
    permutation = node.parameters.get("perm")
    if isinstance(permutation, tuple):
        to_image = conversion(len(permutation), Layout.CHANNELS_LAST)
        return not turned and len(permutation) > 3 and tuple(permutation) == to_image
    return turned
