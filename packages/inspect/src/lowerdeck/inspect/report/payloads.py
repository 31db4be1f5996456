"""Nodes and values of a delegate's payload, in a common form for all backends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lowerdeck.serializer import XnnEncoding, XnnNode, XnnValue, decode_payload, needed_release


@dataclass(frozen=True, slots=True)
class PayloadValue:
    """A value in a payload.

    Attributes:
        shape: Sizes; text for an unknown size.
        constant_bytes: Size of the constant in the payload; None for a computed value.
        detail: Further properties, such as the scale.
    """

    dtype: str
    shape: tuple[int | str, ...]
    constant_bytes: int | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class PayloadNode:
    """An operator in a payload.

    Attributes:
        inputs: Ids of the input values.
        outputs: Ids of the output values.
        detail: Further properties, such as output limits.
    """

    operator: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    detail: str = ""


@dataclass(frozen=True, slots=True)
class PayloadGraph:
    """Nodes and values of a payload, returned by entry points of ``lowerdeck.payloads``.

    Attributes:
        nodes: Nodes in execution order.
        arguments: Value ids by argument index of the delegate, inputs before outputs.
        constant_bytes: Bytes of all distinct constants.
        nested: Number of each operator inside the bodies of loops and branches.
        needs: The oldest release of ExecuTorch that loads the payload, and the reason; None if
            1.4 loads it.
    """

    nodes: tuple[PayloadNode, ...]
    values: Mapping[int, PayloadValue]
    arguments: Mapping[int, int]
    constant_bytes: int
    nested: Mapping[str, int] = field(default_factory=dict)
    needs: tuple[str, str] | None = None


_MAGIC = (b"XH00", b"XN00", b"XN01")


def is_xnnpack(blob: memoryview) -> bool:
    """Return whether a payload has the identifier of XNNPACK."""
    return bytes(blob[4:8]) in _MAGIC


def xnnpack_graph(blob: memoryview) -> PayloadGraph:
    """Return the nodes and values of an XNNPACK payload.

    Raises:
        FormatError: The payload is malformed, or not XNNPACK's.
    """
    graph = decode_payload(blob)
    ids = {number for node in graph.nodes for number in (*node.inputs, *node.outputs)}
    return PayloadGraph(
        nodes=tuple(map(_node, graph.nodes)),
        # Each value is described once: many nodes may read a value with a million scales.
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
