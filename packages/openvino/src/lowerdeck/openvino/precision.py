"""Precision marks in payloads.

The official runtime imports payloads without settings, and a processor with bfloat16 then
computes float32 in bfloat16. No setting survives the export; a mark on an operator does. But
operators that OpenVINO fuses while it compiles, such as a convolution with a batch norm, lose
their marks, so the marks are written into the payload, which holds the fused operators.
"""

from __future__ import annotations

from xml.etree import ElementTree

import openvino
from openvino import Output, Type, opset13

from lowerdeck.openvino.compile_error import CompileError
from lowerdeck.openvino.payload import HEADER, begins_with_text, crossed, without_version

_MARK = {"name": "precise", "version": "0"}


def rounded_to_float16(value: Output) -> Output:
    """Round float32 to float16 precision, computed in float32.

    OpenVINO computes float16 in float32 there, and so removes conversions to float16 and back.
    """

    def number(value: float) -> Output:
        return opset13.constant(value, Type.f32).output(0)

    size = opset13.abs(value)
    # The upper 11 bits: lower ones are lost when added to a number 2**13 times as large.
    larger = opset13.multiply(value, number(2.0**13 + 1))
    normal = opset13.subtract(larger, opset13.subtract(larger, value))
    # Subnormal numbers are multiples of the smallest one.
    steps = opset13.round(opset13.multiply(value, number(2.0**24)), "half_to_even")
    small = opset13.multiply(steps, number(2.0**-24))
    finite = opset13.select(opset13.less(size, number(2.0**-14)), small, normal)
    infinite = opset13.multiply(value, number(1e38))  # or NaN
    return opset13.select(opset13.less(size, number(65520.0)), finite, infinite).output(0)


def with_precision_kept(payload: bytes) -> bytes:
    """Return a payload of the device ``CPU`` with the mark on all operators.

    Raises:
        CompileError: The payload has an unknown layout.
    """
    net = ElementTree.fromstring(text_of(payload))
    for layer in net.iter("layer"):
        marks = layer.find("rt_info")
        if marks is None:
            marks = ElementTree.SubElement(layer, "rt_info")
        if all(mark.get("name") != _MARK["name"] for mark in marks):
            ElementTree.SubElement(marks, "attribute", _MARK)
    marked = crossed(ElementTree.tostring(net, encoding="utf-8", xml_declaration=True))
    rest = without_version(memoryview(payload))
    begin = HEADER.unpack_from(rest)[4]
    header = (*HEADER.unpack_from(rest)[:5], len(marked))
    version = memoryview(payload)[: len(payload) - len(rest)]
    return b"".join((version, HEADER.pack(*header), rest[HEADER.size : begin], marked))


def multiplies_in_subgraphs(payload: bytes) -> bool:
    """Return whether matrix products were fused into generated kernels.

    Args:
        payload: What OpenVINO exported for the device ``CPU``.

    Raises:
        CompileError: The payload has an unknown layout.
    """
    net = ElementTree.fromstring(text_of(payload))
    subgraphs = net.iterfind(".//layer[@type='Subgraph']")
    return any(layer.find(".//layer[@type='MatMul']") is not None for layer in subgraphs)


def text_of(payload: bytes) -> bytes:
    """Return the text of the graph in a payload of the device ``CPU``.

    Raises:
        CompileError: The payload has an unknown layout.
    """
    rest = without_version(memoryview(payload))
    if begins_with_text(rest):
        return crossed(bytes(rest[HEADER.unpack_from(rest)[4] :]))
    raise CompileError(
        f"openvino {openvino.__version__} has an unknown layout of payloads, so that "
        "float32 cannot be kept on processors with bfloat16: install 2025.1 to 2026.4"
    )
