"""Which values of a payload are images, whose dimensions lie in XNNPACK's order."""

from __future__ import annotations

from collections.abc import Collection

from lowerdeck.demo_backends.xnnpack.layout import Layout, conversion
from lowerdeck.demo_backends.xnnpack.schema import Graph, Node, NodeKind

_MAKES_IMAGES = frozenset(
    {
        *(NodeKind.CONV2D, NodeKind.DEPTHWISE_CONV2D, NodeKind.CONV_TRANSPOSE_2D),
        *(NodeKind.MAX_POOLING_2D, NodeKind.AVG_POOLING_2D, NodeKind.GLOBAL_AVG_POOLING_2D),
        NodeKind.STATIC_RESIZE_BILINEAR_2D,
    }
)
_MAKES_NONE = frozenset(
    {NodeKind.STATIC_RESHAPE, NodeKind.FULLY_CONNECTED, NodeKind.BATCH_MATRIX_MULTIPLY}
)
_INPUTS = ("input_id", "input1_id", "input2_id", "input3_id", "input4_id", "input5_id")


def images(graph: Graph) -> frozenset[int]:
    """Return the ids of the values that lie with channels last.

    A payload does not say it: convolutions and pools make images, transpositions turn them, and
    all else leaves them as they are. A transposition of the model's own that looks like a turn
    is taken for one; the order is for reports only, not for what is computed.

    Args:
        graph: The payload's graph.
    """
    found = {v.id for v in graph.values if v.external_id in graph.channels_last and v.flags}
    for node in graph.nodes:
        output = node.fields["output_id"]
        if isinstance(output, int) and _makes_image(node, found):
            found.add(output)
    return frozenset(found)


def _makes_image(node: Node, known: Collection[int]) -> bool:
    if node.kind in _MAKES_IMAGES:
        return True
    if node.kind in _MAKES_NONE:
        return False
    turned = any(node.fields.get(name) in known for name in _INPUTS)
    permutation = node.fields.get("perm")
    if isinstance(permutation, tuple):
        to_image = conversion(len(permutation), Layout.CHANNELS_LAST)
        return not turned and len(permutation) > 3 and tuple(permutation) == to_image
    return turned
