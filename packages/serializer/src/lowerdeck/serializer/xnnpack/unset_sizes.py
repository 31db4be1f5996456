"""Results whose sizes the runtime leaves unset when a payload is called with no images."""

from __future__ import annotations

from lowerdeck.serializer.xnnpack.graph import XnnGraph, XnnValue
from lowerdeck.serializer.xnnpack.operators import XnnOperator

_WINDOWS = frozenset(
    {
        *(XnnOperator.CONV2D, XnnOperator.DEPTHWISE_CONV2D, XnnOperator.CONV_TRANSPOSE_2D),
        *(XnnOperator.MAX_POOLING_2D, XnnOperator.AVG_POOLING_2D),
    }
)
"""Without images they return before they have computed a height and width."""
_SETS = frozenset(
    {
        *(XnnOperator.STATIC_RESHAPE, XnnOperator.STATIC_RESIZE_BILINEAR_2D),
        XnnOperator.GLOBAL_AVG_POOLING_2D,
    }
)
"""What gives a height and width by itself."""


def unset_result(graph: XnnGraph) -> int | None:
    """Return which argument of a call may come back with sizes that nobody has set.

    Args:
        graph: The payload, verified.

    Returns:
        The first such argument's position; None where there is none: the number of images and one
        of the other sizes must both vary, which a payload of ours says by declaring 0.
    """
    values = {value.id: value for value in graph.values}
    unset: set[int] = set()
    for node in graph.nodes:
        reads_unset = node.operator not in _SETS and not unset.isdisjoint(node.inputs)
        if reads_unset or node.operator in _WINDOWS:
            unset.update(one for one in node.outputs if _varies(values[one]))
    found = [value.external_id for one in unset if (value := values[one]).external_id is not None]
    return min(found, default=None)


def _varies(value: XnnValue) -> bool:
    return len(value.shape) == 4 and not value.shape[0] and 0 in value.shape[1:]
