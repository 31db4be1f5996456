"""Precision of the result of each node of a payload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lowerdeck.serializer import XnnDatatype, XnnNode, XnnValue

_RELATIVE = {
    XnnDatatype.FP16: 2.0**-10,
    XnnDatatype.BF16: 2.0**-7,
    # The scales of groups are bfloat16. Their errors are random, and the sum of a row's is seldom
    # more than this part of the largest result.
    XnnDatatype.QBINT4: 2.0**-8,
}
"""What a datatype costs, in a result or in a filter, as a part of the largest number."""


@dataclass(frozen=True, slots=True)
class Precision:
    """How exactly a node can say what it computed.

    Attributes:
        step: Distance of neighbouring numbers, None for floats and for what varies.
        zero_point: The integer that stands for 0.
        limits: The smallest integer and the largest.
        at_run_time: Whether each row, or image, has a step of its own that is found at each call.
        relative: What the largest number may be off by, as a part of it.
    """

    step: float | None = None
    zero_point: int = 0
    limits: tuple[int, int] = (-128, 127)
    at_run_time: bool = False
    relative: float = 0.0


def precision_of(node: XnnNode, values: Mapping[int, XnnValue]) -> Precision | None:
    """Return how exact a node is, None for float32 throughout.

    Args:
        values: The values of its payload by id.
    """
    made = values[node.outputs[0]]
    relative = max(_RELATIVE.get(values[one].dtype, 0.0) for one in (*node.inputs, made.id))
    if made.dtype is XnnDatatype.QDINT8:
        return Precision(at_run_time=True, relative=relative)
    if made.encoding.scheme:
        return Precision(made.encoding.scale, made.encoding.zero_point, relative=relative)
    return Precision(relative=relative) if relative else None
