"""Validating reader of payloads, without OpenVINO.

A ``CPU`` payload has a header and three parts, the last of which is the compiled graph in
OpenVINO's XML.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar
from xml.etree import ElementTree

from lowerdeck.inspect import PayloadGraph, PayloadNode, PayloadValue
from lowerdeck.openvino.errors import BlobError

HEADER = struct.Struct("<6Q")
"""Offset and size of three parts: device data, constants and the graph's XML."""
_VERSION = struct.Struct("<8sIQ")
"""Prefix of the header since OpenVINO 2026: magic, a number and the length of a version string.

The version string follows. Header offsets are relative to its end.
"""
_VERSION_MARK = b"RR_UPCVO"
# OpenVINO XORs the text with these bytes.
_KEY = bytes((0x30, 0x60, 0x70, 0x02, 0x04, 0x08, 0x3F, 0x6F, 0x72, 0x74, 0x78, 0x7F))
_BEGIN = b"<?xml"
_NO_DTYPE = "unspecified"  # the placeholder of a missing bias
_MAX_LISTED = 12
_CHUNK = len(_KEY) * 4096
_TYPES = {
    "FP32": "fp32",
    "FP16": "fp16",
    "FP64": "fp64",
    "BF16": "bf16",
    "BOOL": "bool",
    **{f"I{bits}": f"int{bits}" for bits in (4, 8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (1, 4, 8, 16, 32, 64)},
}
_Result = TypeVar("_Result")
_Port = tuple[str, str]
"""Layer id and port id in the XML."""


def decode_payload(blob: memoryview) -> PayloadGraph:
    """Return the graph of a ``CPU`` payload.

    The operators are those after OpenVINO's fusions. Kernels are not included, because the machine
    that runs the payload selects them.

    Raises:
        BlobError: The payload is damaged, or is for another device or from an unknown version.
    """
    return _read(blob, _Reader.graph)


def operator_numbers(blob: memoryview) -> dict[str, int]:
    """Return the index of each operator in ``decode_payload``'s order, by name.

    Raises:
        BlobError: The payload is damaged, or is for another device or from an unknown version.
    """
    return _read(blob, _Reader.numbers)


def _read(blob: memoryview, read_part: Callable[[_Reader], _Result]) -> _Result:
    blob = without_version(memoryview(blob).cast("B"))
    start, constants, text = _parts(blob)
    reader = _Reader(constants)
    parser = ElementTree.XMLParser(target=reader, encoding="utf-8")
    try:
        for piece in _pieces(blob[start : start + text]):
            parser.feed(piece)
        parser.close()
        return read_part(reader)
    except (ElementTree.ParseError, KeyError, ValueError) as error:
        if isinstance(error, BlobError):
            raise
        raise BlobError(
            f"found a damaged graph in a payload of {len(blob)} bytes ({type(error).__name__}: "
            f"{error}): compile it again"
        ) from error


def xor_text(text: bytes) -> bytes:
    """Return XOR-obfuscated text as plain text, or vice versa.

    Args:
        text: Text that starts at a multiple of the key length, 12 bytes.
    """
    key = (_KEY * (len(text) // len(_KEY) + 1))[: len(text)]
    number = int.from_bytes(text, "little") ^ int.from_bytes(key, "little")
    return number.to_bytes(len(text), "little")


def without_version(blob: memoryview) -> memoryview:
    """Return a payload without the version prefix of OpenVINO 2026."""
    if len(blob) < _VERSION.size or bytes(blob[:8]) != _VERSION_MARK:
        return blob
    return blob[_VERSION.size + _VERSION.unpack_from(blob)[2] :]


def begins_with_text(blob: memoryview) -> bool:
    """Return whether a payload without version prefix has the known layout."""
    if len(blob) < HEADER.size:
        return False
    begin, size = HEADER.unpack_from(blob)[4:]
    start = bytes(blob[begin : begin + len(_BEGIN)]) if begin < len(blob) else b""
    return begin + size == len(blob) and xor_text(start) == _BEGIN


def _parts(blob: memoryview) -> tuple[int, int, int]:
    """Return the offset of the text, and the sizes of constants and text."""
    if not begins_with_text(blob):
        raise BlobError(
            f"found a payload of {len(blob)} bytes that begins with {bytes(blob[:8])!r}; expected "
            "one for the device CPU, from OpenVINO 2025.4 to 2026.4: only drivers can open "
            "payloads for other devices"
        )
    _, _, place, constants, begin, text = HEADER.unpack_from(blob)
    if place + constants > begin:
        raise BlobError(
            f"found constants at {place} to {place + constants} of a payload of {len(blob)} "
            f"bytes; expected them before the graph at {begin}: it is damaged"
        )
    return begin, constants, text


def _pieces(text: memoryview) -> Iterator[bytes]:
    for start in range(0, len(text), _CHUNK):
        yield xor_text(bytes(text[start : start + _CHUNK]))


@dataclass(slots=True)
class _Layer:
    """Operator, constant, input or output of the graph."""

    kind: str
    name: str = ""
    inputs: list[str] = field(default_factory=list)
    outputs: dict[str, int] = field(default_factory=dict)
    constant_size: int | None = None
    limits: str = ""
    inside: list[str] = field(default_factory=list)

    @property
    def detail(self) -> str:
        """Nested operators of the layer, or the limits of a clamp."""
        return f"joins {', '.join(self.inside[:_MAX_LISTED])}" if self.inside else self.limits


class _Reader:
    """Target of the XML parser.

    Layers of the root graph are recorded; nested ones are counted, and listed with their parent.

    Args:
        constants: Size of the payload's constants in bytes.
    """

    def __init__(self, constants: int) -> None:
        self._constants = constants
        self._path: list[str] = []
        self._layers: dict[str, _Layer] = {}
        self._layer = _Layer("")
        self._values: dict[int, PayloadValue] = {}
        self._edges: dict[_Port, _Port] = {}
        self._nested: Counter[str] = Counter()
        self._inside = ""
        self._places: set[tuple[int, int]] = set()
        self._dtype, self._port = "", ""
        self._sizes: list[int | str] = []
        self._text: list[str] = []

    def doctype(self, name: str, _public: str, _system: str) -> None:
        """Reject document type declarations, which OpenVINO never writes."""
        raise BlobError(f"found a document type {name!r} in the graph's XML; expected none")

    def start(self, tag: str, about: dict[str, str]) -> None:
        """Handle the start of an element."""
        self._path.append(tag)
        begin = _HANDLERS.get("/".join(self._path)) if len(self._path) <= _DEEPEST else None
        if begin is not None:
            begin(self, about)
        elif tag == "layer":
            self._inside = about["type"]
            if self._inside not in _NO_OPERATORS:
                self._nested[self._inside] += 1
                self._layer.inside.append(self._inside)
        elif tag == "data" and self._path[-2] == "layer" and self._inside == "Const":
            self._place(about)

    def data(self, text: str) -> None:
        """Handle text between elements."""
        if self._path[-1] == "dim" and len(self._path) == _DEEPEST:
            self._text.append(text)

    def end(self, _tag: str) -> None:
        """Handle the end of an element."""
        if len(self._path) == _DEEPEST and self._path[-1] == "dim":
            text = "".join(self._text).strip()
            self._text = []
            self._sizes.append(int(text) if text.isdecimal() else text.replace("-1", "?"))
        elif self._path == _OUTPUT:
            number = len(self._values)
            self._layer.outputs[self._port] = number
            sizes = tuple(self._sizes)
            self._values[number] = PayloadValue(self._dtype, sizes, self._layer.constant_size)
        self._path.pop()

    def close(self) -> None:
        """Handle the end of the text."""

    def begin_layer(self, about: dict[str, str]) -> None:
        """Handle the start of an operator."""
        self._layer = _Layer(about["type"], about["name"])
        if about["id"] in self._layers:
            raise ValueError(f"found two operators with the number {about['id']!r}")
        self._layers[about["id"]] = self._layer

    def record_attributes(self, about: dict[str, str]) -> None:
        """Record the size of a constant or the limits of a clamp."""
        if self._layer.kind == "Const":
            self._layer.constant_size = self._place(about)
        elif self._layer.kind == "Clamp":
            low, high = float(about["min"]), float(about["max"])
            self._layer.limits = f"limits {low:.6g} to {high:.6g}"

    def record_input(self, about: dict[str, str]) -> None:
        """Record an input of an operator."""
        self._layer.inputs.append(about["id"])

    def begin_output(self, about: dict[str, str]) -> None:
        """Record an output of an operator; its sizes follow."""
        self._port = about["id"]
        self._dtype = _TYPES.get(about["precision"], about["precision"].lower())
        self._sizes = []

    def record_edge(self, about: dict[str, str]) -> None:
        """Record an edge."""
        source = about["from-layer"], about["from-port"]
        self._edges[about["to-layer"], about["to-port"]] = source

    def graph(self) -> PayloadGraph:
        """Return the graph.

        Raises:
            KeyError: An edge refers to a missing operator.
            ValueError: The graph has no result.
        """
        inputs: list[int] = []
        outputs: list[int] = []
        nodes = []
        for name, layer in self._layers.items():
            sources = [self._source(self._edges[name, port]) for port in layer.inputs]
            operands = tuple(value for value in sources if self._values[value].dtype != _NO_DTYPE)
            results = tuple(layer.outputs.values())
            if layer.kind == "Parameter":
                inputs += results
            elif layer.kind == "Result":
                outputs += operands
            elif layer.kind != "Const":
                nodes.append(PayloadNode(layer.kind, operands, results, layer.detail))
        if not outputs:
            raise ValueError("a graph without results")
        return PayloadGraph(
            *(tuple(nodes), self._values, dict(enumerate([*inputs, *outputs]))),
            *(sum(size for _, size in self._places), self._nested),
        )

    def numbers(self) -> dict[str, int]:
        """Return the index of each operator by name."""
        layers = [layer for layer in self._layers.values() if layer.kind not in _NO_OPERATORS]
        return {layer.name: number for number, layer in enumerate(layers)}

    def _place(self, about: dict[str, str]) -> int:
        """Record the offset of a constant, and return its size in bytes."""
        offset, size = int(about["offset"]), int(about["size"])
        if min(offset, size) < 0 or offset + size > self._constants:
            raise ValueError(
                f"a constant at {offset} to {offset + size} of {self._constants} bytes"
            )
        self._places.add((offset, size))
        return size

    def _source(self, port: _Port) -> int:
        return self._layers[port[0]].outputs[port[1]]


_NO_OPERATORS = ("Parameter", "Const", "Result")
_OUTPUT = ["net", "layers", "layer", "output", "port"]
_DEEPEST = len(_OUTPUT) + 1
_HANDLERS: dict[str, Callable[[_Reader, dict[str, str]], None]] = {
    "net/layers/layer": _Reader.begin_layer,
    "net/layers/layer/data": _Reader.record_attributes,
    "net/layers/layer/input/port": _Reader.record_input,
    "net/layers/layer/output/port": _Reader.begin_output,
    "net/edges/edge": _Reader.record_edge,
}
