"""Precision of node results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from lowerdeck.serializer import XnnDatatype, XnnNode, XnnValue

_RELATIVE = {
    XnnDatatype.FP16: 2.0**-10,
    XnnDatatype.BF16: 2.0**-7,
    # Group scales are bfloat16. Their rounding errors rarely sum up to more than this fraction of
    # the largest result.
    XnnDatatype.QBINT4: 2.0**-8,
}
"""Relative rounding error of a datatype, in a result or a filter."""


class Precision(NamedTuple):
    """Precision of a node's result.

    Attributes:
        step: Quantisation step, None for floats and for dynamic steps.
        zero_point: The integer that represents 0.0.
        limits: Smallest and largest integer.
        at_run_time: Whether the step is computed per row or image at run time.
        relative: Largest error, relative to the largest number.
    """

    step: float | None = None
    zero_point: int = 0
    limits: tuple[int, int] = (-128, 127)
    at_run_time: bool = False
    relative: float = 0.0


def precision_of(node: XnnNode, values: Mapping[int, XnnValue]) -> Precision | None:
    """Return the precision of a node's result; None for float32.

    Args:
        values: The values of its payload by id.
    """
    result = values[node.outputs[0]]
    relative = max(
        _RELATIVE.get(values[value_id].dtype, 0.0) for value_id in (*node.inputs, result.id)
    )
    if result.dtype is XnnDatatype.QDINT8:
        return Precision(at_run_time=True, relative=relative)
    if result.encoding.scheme:
        return Precision(result.encoding.scale, result.encoding.zero_point, relative=relative)
    return Precision(relative=relative) if relative else None
