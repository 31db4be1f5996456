"""Data types of the values that an XNNPACK node takes and makes.

Each rule was found by running every operator with every pair of types in the runtimes of
ExecuTorch 1.4.1 and 1.5.1. Both refuse the file when they load it, or give garbage where a node
of floats mixes their widths.
"""

from __future__ import annotations

from collections.abc import Mapping

from lowerdeck.serializer.xnnpack.graph import XnnGraph, XnnNode, XnnValue
from lowerdeck.serializer.xnnpack.operators import XnnDatatype, XnnOperator
from lowerdeck.serializer.xnnpack.verify_nodes import damaged

_T, _O = XnnDatatype, XnnOperator
_FLOATS = frozenset({_T.FP32, _T.FP16})
_BYTES = frozenset({_T.QINT8, _T.QUINT8})
_KNOWN = _FLOATS | _BYTES | {_T.BF16, _T.INT32}
# What these make has the scale and zero point of all that they take.
_MOVES = frozenset(
    {
        *(
            _O.COPY,
            _O.STATIC_TRANSPOSE,
            _O.STATIC_RESHAPE,
            _O.STATIC_SLICE,
            _O.STATIC_CONSTANT_PAD,
        ),
        *(_O.CONCATENATE2, _O.CONCATENATE3, _O.CONCATENATE4, _O.CONCATENATE5),
        *(_O.MAX_POOLING_2D, _O.STATIC_RESIZE_BILINEAR_2D),
    }
)
_UNARY = frozenset(
    {
        *(_O.SIGMOID, _O.FLOOR, _O.SQUARE_ROOT, _O.CEILING, _O.HARDSWISH, _O.LEAKY_RELU, _O.ELU),
        *(_O.RECIPROCAL_SQUARE_ROOT, _O.LOG, _O.GELU, _O.TANH, _O.EXP, _O.SIN, _O.COS),
    }
)
_UNARY_OF_INTEGERS = frozenset({_O.CLAMP, _O.NEGATE, _O.SQUARE, _O.ABS})
_BINARY = frozenset({_O.ADD, _O.DIV, _O.MINIMUM, _O.MULTIPLY, _O.SUBTRACT, _O.MAXIMUM})
# Of one type throughout.
_TYPES: dict[XnnOperator, frozenset[XnnDatatype]] = {
    **dict.fromkeys(_MOVES | _UNARY_OF_INTEGERS | _BINARY, _KNOWN),
    **dict.fromkeys((*_UNARY, _O.PRELU), _KNOWN - {_T.INT32}),
    **dict.fromkeys((_O.MAX_POOLING_2D, _O.STATIC_RESIZE_BILINEAR_2D), _FLOATS | _BYTES),
    **dict.fromkeys((_O.SOFTMAX, _O.AVG_POOLING_2D), _FLOATS),
}
_LATER = "1.5"


def verify_types(graph: XnnGraph, values: Mapping[int, XnnValue]) -> None:
    """Check the types that nodes take and make.

    Args:
        graph: The graph, whose nodes refer to values that are there.
        values: Its values by their ids.

    Raises:
        FormatError: No runtime loads the node, or it gives garbage.
    """
    for node in graph.nodes:
        kinds = _kinds(node, values)
        # The rest is found out elsewhere: layers, and values that are quantised at run time.
        if not kinds <= _KNOWN:
            continue
        accepted = _TYPES.get(node.operator)
        if accepted is not None and not (
            (len(kinds) == 1 and kinds <= accepted) or _is_later(node, kinds)
        ):
            one = "one of " if len(accepted) > 1 else ""
            raise damaged(
                f"found {_names(kinds)} at {node.operator.label}, expected {one}"
                f"{_names(accepted)} throughout: the runtime refuses it or gives garbage"
            )
        if node.operator in _MOVES and kinds & _BYTES:
            _verify_one_scale(node, values)


def needed_release(graph: XnnGraph) -> tuple[str, str] | None:
    """Return the oldest release of ExecuTorch that loads a payload which 1.4 refuses.

    Args:
        graph: Any graph that could be read.

    Returns:
        The release, and what needs it; None if 1.4 loads the payload.
    """
    values = {value.id: value for value in graph.values}
    for node in graph.nodes:
        kinds = _kinds(node, values)
        if kinds <= _KNOWN and _is_later(node, kinds):
            return _LATER, f"{node.operator.label} of {_names(kinds)}"
        if node.operator is _O.FULLY_CONNECTED and _T.BF16 in _made(node, values):
            return _LATER, f"{node.operator.label} that makes BF16"
    return None


def _kinds(node: XnnNode, values: Mapping[int, XnnValue]) -> frozenset[XnnDatatype]:
    return frozenset(
        values[number].dtype for number in (*node.inputs, *node.outputs) if number in values
    )


def _made(node: XnnNode, values: Mapping[int, XnnValue]) -> frozenset[XnnDatatype]:
    return frozenset(values[number].dtype for number in node.outputs if number in values)


def _is_later(node: XnnNode, kinds: frozenset[XnnDatatype]) -> bool:
    unary = node.operator in _UNARY or node.operator in _UNARY_OF_INTEGERS
    return unary and kinds == {_T.BF16, _T.FP32}


def _verify_one_scale(node: XnnNode, values: Mapping[int, XnnValue]) -> None:
    numbers = (*node.inputs, *node.outputs)
    scales = {
        (how.scales[:1], how.zero_point)
        for number in numbers
        if (how := values[number].encoding).scheme
    }
    if len(scales) > 1:
        found = " and ".join(sorted(f"{scale[0]:g} (zero {zero})" for scale, zero in scales))
        raise damaged(
            f"found the scales {found} at {node.operator.label}, expected one for all that it "
            "takes and makes: the runtime refuses to load it"
        )


def _names(kinds: frozenset[XnnDatatype]) -> str:
    return ", ".join(sorted(kind.name for kind in kinds))
