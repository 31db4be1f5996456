"""Marks in a payload that keep the precision of each operator.

The official runtime imports payloads without settings, and a processor with bfloat16 then
chooses that for float32. No setting survives the export. What does is a mark on operators, but
those that OpenVINO makes of a model's while it compiles, such as a convolution with the factors of
a batch norm in it, lose it: so it is written into the payload, which holds what they became.
"""

from __future__ import annotations

from xml.etree import ElementTree

import openvino
from openvino import Output, Type, opset13

from lowerdeck.openvino.compile_error import CompileError
from lowerdeck.openvino.payload import HEADER, begins_with_text, crossed, without_version

_MARK = {"name": "precise", "version": "0"}


def rounded_to_float16(value: Output) -> Output:
    """Return float32 rounded to what float16 holds, computed in float32.

    OpenVINO computes float16 in float32 there, and so drops conversions to it and back.
    """

    def number(value: float) -> Output:
        return opset13.constant(value, Type.f32).output(0)

    size = opset13.abs(value)
    # The upper 11 bits: lower ones are lost when added to a number 2**13 times as large.
    larger = opset13.multiply(value, number(2.0**13 + 1))
    normal = opset13.subtract(larger, opset13.subtract(larger, value))
    # Beneath the normal numbers, multiples of the least.
    steps = opset13.round(opset13.multiply(value, number(2.0**24)), "half_to_even")
    small = opset13.multiply(steps, number(2.0**-24))
    finite = opset13.select(opset13.less(size, number(2.0**-14)), small, normal)
    infinite = opset13.multiply(value, number(1e38))  # or NaN
    return opset13.select(opset13.less(size, number(65520.0)), finite, infinite).output(0)


def with_precision_kept(payload: bytes) -> bytes:
    """Return a payload of the device ``CPU`` whose operators all bear the mark.

    Raises:
        CompileError: It is laid out otherwise than those of the versions that are known.
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
    """Return whether products of matrices became part of a kernel that OpenVINO made for a model.

    Args:
        payload: What OpenVINO exported for the device ``CPU``.

    Raises:
        CompileError: It is laid out otherwise than those of the versions that are known.
    """
    net = ElementTree.fromstring(text_of(payload))
    subgraphs = net.iterfind(".//layer[@type='Subgraph']")
    return any(layer.find(".//layer[@type='MatMul']") is not None for layer in subgraphs)


def text_of(payload: bytes) -> bytes:
    """Return the text of the graph in a payload of the device ``CPU``.

    Raises:
        CompileError: It is laid out otherwise than those of the versions that are known.
    """
    rest = without_version(memoryview(payload))
    if begins_with_text(rest):
        return crossed(bytes(rest[HEADER.unpack_from(rest)[4] :]))
    raise CompileError(
        f"openvino {openvino.__version__} has an unknown layout of payloads, so that "
        "float32 cannot be kept on processors with bfloat16: install 2025.1 to 2026.4"
    )
