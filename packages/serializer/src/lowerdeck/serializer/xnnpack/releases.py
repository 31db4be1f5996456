"""The oldest release of ExecuTorch that runs the data types of an XNNPACK node.

Found by running every operator with every pair of types in the runtimes of ExecuTorch 1.4.1 and
1.5.1: the older one rejects the newer combinations at load.
"""

from __future__ import annotations

from lowerdeck.serializer.xnnpack.graph import XnnGraph
from lowerdeck.serializer.xnnpack.operators import XnnDatatype, XnnOperator

_T, _O = XnnDatatype, XnnOperator
_LATER = "1.5"
_UNARY = frozenset(
    {
        *(_O.SIGMOID, _O.FLOOR, _O.SQUARE_ROOT, _O.CEILING, _O.HARDSWISH, _O.LEAKY_RELU, _O.ELU),
        *(_O.RECIPROCAL_SQUARE_ROOT, _O.LOG, _O.GELU, _O.TANH, _O.EXP, _O.SIN, _O.COS),
        *(_O.CLAMP, _O.NEGATE, _O.SQUARE, _O.ABS),
    }
)


def needed_release(graph: XnnGraph) -> tuple[str, str] | None:
    """Return the oldest release of ExecuTorch that loads a payload rejected by 1.4.

    Returns:
        The release and the feature that needs it; None if 1.4 loads the payload.
    """
    kinds = {value.id: value.dtype for value in graph.values}
    for node in graph.nodes:
        results = {kinds[number] for number in node.outputs if number in kinds}
        both = results | {kinds[number] for number in node.inputs if number in kinds}
        if node.operator in _UNARY and both == {_T.BF16, _T.FP32}:
            return _LATER, f"{node.operator.label} of BF16, FP32"
        if node.operator is _O.FULLY_CONNECTED and _T.BF16 in results:
            return _LATER, f"{node.operator.label} with BF16 output"
    return None
