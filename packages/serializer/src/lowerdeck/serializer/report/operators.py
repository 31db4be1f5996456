"""The operators inside a payload of XNNPACK, the one backend whose payloads we can read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from lowerdeck.serializer.errors import FormatError
from lowerdeck.serializer.xnnpack.graph import XnnNode, XnnValue
from lowerdeck.serializer.xnnpack.payload import decode_payload

_MOST_NODES = 400
_MOST_SIZES = 6


def operators_inside(blob: memoryview) -> tuple[list[list[str | int]], list[str]]:
    """Return the operators of an XNNPACK graph.

    Args:
        blob: The bytes of a delegate of any backend.

    Returns:
        Pairs of name and count, most frequent first; and the first nodes in order, each with the
        types and sizes that it takes and makes. Nothing if the blob is not XNNPACK's or is
        broken, for a picture must not fail on a blob.
    """
    if bytes(blob[4:8]) not in (b"XH00", b"XN00", b"XN01"):
        return [], []
    try:
        graph = decode_payload(blob)
    except FormatError:
        return [], []
    counts = Counter(node.operator.label for node in graph.nodes)
    values = {value.id: value for value in graph.values}
    lines = [_line(node, values) for node in graph.nodes[:_MOST_NODES]]
    return [[name, count] for name, count in counts.most_common()], lines


def _line(node: XnnNode, values: Mapping[int, XnnValue]) -> str:
    taken, made = _operands(node.inputs, values), _operands(node.outputs, values)
    return f"{node.operator.label}({taken}) -> {made}"


def _operands(ids: Iterable[int], values: Mapping[int, XnnValue]) -> str:
    return ", ".join(_described(values[one]) if one in values else "?" for one in ids)


def _described(value: XnnValue) -> str:
    sizes = ", ".join(map(str, value.shape[:_MOST_SIZES]))
    more = ", ..." if len(value.shape) > _MOST_SIZES else ""
    return f"{value.dtype.name.lower()}[{sizes}{more}]{' constant' * bool(value.constant)}"
