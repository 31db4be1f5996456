"""Precision marks in payloads.

The official runtime imports payloads without settings, so CPUs with bfloat16 would compute float32
in bfloat16. Precision marks on operators prevent this. Fusions during compilation drop the marks,
so they are written to the operators in the payload.
"""

from __future__ import annotations

from xml.etree import ElementTree

import openvino
from openvino import Output, Type, opset13

from lowerdeck.openvino.compile_error import CompileError
from lowerdeck.openvino.payload import HEADER, begins_with_text, without_version, xor_text

_MARK = {"name": "precise", "version": "0"}


def rounded_to_float16(value: Output) -> Output:
    """Return float32 values rounded to float16 precision.

    If OpenVINO keeps float32 precision, it also computes float16 operators in float32 and removes
    conversions to float16 and back. Therefore the rounding is computed explicitly.
    """

    def number(value: float) -> Output:
        return opset13.constant(value, Type.f32).output(0)

    magnitude = opset13.abs(value)
    # Veltkamp splitting: keep the upper 11 bits.
    larger = opset13.multiply(value, number(2.0**13 + 1))
    normal = opset13.subtract(larger, opset13.subtract(larger, value))
    # Subnormal numbers are multiples of the smallest one.
    steps = opset13.round(opset13.multiply(value, number(2.0**24)), "half_to_even")
    small = opset13.multiply(steps, number(2.0**-24))
    finite = opset13.select(opset13.less(magnitude, number(2.0**-14)), small, normal)
    infinite = opset13.multiply(value, number(1e38))  # or NaN
    return opset13.select(opset13.less(magnitude, number(65520.0)), finite, infinite).output(0)


def with_precision_kept(payload: bytes) -> bytes:
    """Return a ``CPU`` payload with precision marks on all operators.

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
    marked = xor_text(ElementTree.tostring(net, encoding="utf-8", xml_declaration=True))
    unversioned = without_version(memoryview(payload))
    begin = HEADER.unpack_from(unversioned)[4]
    header = (*HEADER.unpack_from(unversioned)[:5], len(marked))
    version = memoryview(payload)[: len(payload) - len(unversioned)]
    return b"".join((version, HEADER.pack(*header), unversioned[HEADER.size : begin], marked))


def multiplies_in_subgraphs(payload: bytes) -> bool:
    """Return whether matrix products were fused into generated kernels.

    Args:
        payload: A ``CPU`` payload.

    Raises:
        CompileError: The payload has an unknown layout.
    """
    net = ElementTree.fromstring(text_of(payload))
    subgraphs = net.iterfind(".//layer[@type='Subgraph']")
    return any(layer.find(".//layer[@type='MatMul']") is not None for layer in subgraphs)


def text_of(payload: bytes) -> bytes:
    """Return the graph's XML in a ``CPU`` payload.

    Raises:
        CompileError: The payload has an unknown layout.
    """
    unversioned = without_version(memoryview(payload))
    if begins_with_text(unversioned):
        return xor_text(bytes(unversioned[HEADER.unpack_from(unversioned)[4] :]))
    raise CompileError(
        f"openvino {openvino.__version__} has an unknown layout of payloads, so "
        "float32 cannot be kept on CPUs with bfloat16: install 2025.4 to 2026.4"
    )
