"""Convert XNNPACK payloads to the common form."""

from __future__ import annotations

from lowerdeck.inspect.report.payloads.graph import PayloadGraph, PayloadNode, PayloadValue
from lowerdeck.serializer import XnnEncoding, XnnNode, XnnValue, decode_payload, needed_release

_MAGIC = (b"XH00", b"XN00", b"XN01")


def is_xnnpack(blob: memoryview) -> bool:
    """Return whether a payload has the identifier of XNNPACK.

    Args:
        blob: The bytes of a delegate.
    """
    return bytes(blob[4:8]) in _MAGIC


def xnnpack_graph(blob: memoryview) -> PayloadGraph:
    """Return the nodes and values of an XNNPACK payload.

    Args:
        blob: The bytes of a delegate.

    Raises:
        FormatError: The payload is malformed, or not XNNPACK's.
    """
    graph = decode_payload(blob)
    ids = {number for node in graph.nodes for number in (*node.inputs, *node.outputs)}
    return PayloadGraph(
        nodes=tuple(map(_node, graph.nodes)),
        # Each value once: one with a million scales may be read by every node.
        values={value.id: _value(value) for value in graph.values if value.id in ids},
        arguments={
            value.external_id: value.id for value in graph.values if value.external_id is not None
        },
        # Shared constants have the same key or offset, and count once.
        constant_bytes=sum(
            {(item.key or item.offset): item.size for item in graph.constants}.values()
        ),
        needs=needed_release(graph),
    )


def _node(node: XnnNode) -> PayloadNode:
    limits = "" if node.output_range is None else f"limits {_span(*node.output_range)}"
    return PayloadNode(node.operator.label, node.inputs, node.outputs, limits)


def _value(value: XnnValue) -> PayloadValue:
    return PayloadValue(
        value.dtype.name.lower(),
        value.shape,
        None if value.constant is None else value.constant.size,
        _scales(value.encoding),
    )


def _scales(how: XnnEncoding) -> str:
    if not how.scheme:
        return ""
    if how.scheme == "token":
        return "scales computed at run time"
    if how.scheme == "tensor":
        return f"scale {how.scale:.6g} zero {how.zero_point}"
    which = "channel" if how.scheme == "channel" else f"{how.group_size}"
    # Scales in named data are not in the payload.
    span = f" {_span(min(how.scales), max(how.scales))}" if how.scales else ""
    return f"scales{span} for each {which}"


def _span(low: float, high: float) -> str:
    return f"{low:.6g}" if low == high else f"{low:.6g} to {high:.6g}"
