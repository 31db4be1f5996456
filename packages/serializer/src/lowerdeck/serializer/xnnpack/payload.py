"""Reads the payload of an XNNPACK delegate without trust."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from lowerdeck.serializer.errors import (
    EnumError,
    IndexRangeError,
    MagicError,
    MissingFieldError,
    TruncatedError,
)
from lowerdeck.serializer.flatbuffer.limits import OBJECT_COST
from lowerdeck.serializer.flatbuffer.tables import TableReader, root_position
from lowerdeck.serializer.xnnpack.graph import (
    XnnConstant,
    XnnGraph,
    XnnNode,
    XnnQuantization,
    XnnValue,
)
from lowerdeck.serializer.xnnpack.operators import PAYLOAD_TABLES, XnnDatatype, XnnOperator

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

BACKEND = "XnnpackBackend"
"""The name under which delegates hold such payloads."""
_MAGIC = b"XH00"
_HEADER = struct.Struct("<4x4sHIIIQ")
"""Four zeros, the magic, header size, graph offset and size, constants offset and size."""
_IDENTIFIERS = (b"XN00", b"XN01")
_NONE = 0xFFFFFFFF
"""The id that stands for 'no value'."""
_OPTIONAL = ("bias_id", "mask_id")
_PLAIN, _QUANTISED = 1, 2
_SCHEMES = (
    "",
    "PerChannelQuant",
    "PerTensorQuant",
    "PerTokenDynamicQuant",
    "PerChannelGroupQuant",
)
_OPERATORS = {int(operator): operator for operator in XnnOperator}
_DATATYPES = {int(kind): kind for kind in XnnDatatype}


def decode_payload(data: ReadableBuffer) -> XnnGraph:
    """Return the graph in the payload of a delegate of ``XnnpackBackend``.

    Reads what ExecuTorch 1.4.1 reads: payloads with a header, whose constants lie in the payload
    or in the file's named data, and bare graphs without constants; floating and quantised ones.

    Args:
        data: The bytes of the delegate.

    Returns:
        The graph. Its tables are well-formed and its constants exist; whether the runtime could
        run it is for :func:`verify_pte` to say.

    Raises:
        FormatError: The payload is truncated or malformed, of another version, or no payload of
            XNNPACK.

    Example:
        >>> from lowerdeck.serializer import decode_payload
        >>> decode_payload(b"")
        Traceback (most recent call last):
        ...
        lowerdeck.serializer.errors.TruncatedError: file at byte 0: found 0 bytes, expected at \
least 8
    """
    blob = memoryview(data).cast("B")
    graph, constants = _parts(blob)
    if len(graph) >= 8 and bytes(graph[4:8]) not in _IDENTIFIERS:
        raise MagicError(
            f"found {bytes(graph[4:8])!r}, expected {_MAGIC!r} before the graph, or a graph of "
            "the version XN00 or XN01: is this a delegate of XnnpackBackend?",
            field="XNNPACK identifier",
            offset=4,
        )
    root = root_position(graph)
    return _Decoder(TableReader(graph, PAYLOAD_TABLES)).graph(root, constants)


def _parts(blob: memoryview) -> tuple[memoryview, memoryview]:
    """Return the graph's bytes and those of the constants after it."""
    if bytes(blob[4:8]) != _MAGIC:
        return blob, blob[:0]
    if len(blob) < _HEADER.size:
        raise TruncatedError(
            f"found {len(blob)} bytes, expected at least {_HEADER.size}", field="XNNPACK header"
        )
    _, _, start, size, constants, inside = _HEADER.unpack_from(blob)
    end = start + size
    if end > len(blob) or constants < end or constants + inside > len(blob):
        raise TruncatedError(
            f"found {len(blob)} bytes, expected the graph at {start} to {end} and the constants "
            f"at {constants} to {constants + inside} after it",
            field="XNNPACK header",
        )
    return blob[start:end], blob[constants : constants + inside]


class _Decoder:
    """Makes a graph of tables."""

    def __init__(self, reader: TableReader) -> None:
        self._reader = reader
        self._constants: tuple[XnnConstant, ...] = ()

    def graph(self, root: int, data: memoryview) -> XnnGraph:
        version, nodes, values, externs, inputs, outputs, _, _, constants = self._reader.fields(
            "XNNGraph", root
        )
        for vector, name in ((nodes, "xnodes"), (values, "xvalues")):
            if not vector:
                raise MissingFieldError("found no vector", field=f"XNNGraph.{name}", offset=root)
        self._constants = tuple(map(self._constant, self._tables(constants, "constant_data")))
        return XnnGraph(
            version=self._reader.string(version, "XNNGraph.version") if version else "",
            values=tuple(map(self._value, self._tables(values, "xvalues"))),
            nodes=tuple(map(self._node, self._tables(nodes, "xnodes"))),
            input_ids=self._numbers(inputs, "XNNGraph.input_ids"),
            output_ids=self._numbers(outputs, "XNNGraph.output_ids"),
            num_externs=externs,
            constants=self._constants,
            constant_data=data,
        )

    def _tables(self, vector: int, name: str) -> Any:
        field = f"XNNGraph.{name}"
        for at in self._reader.tables(vector, field):
            # One table may be in a vector a thousand times.
            self._reader.spend(OBJECT_COST, field, at)
            yield at

    def _numbers(self, vector: int, field: str, kind: str = "u32") -> tuple[Any, ...]:
        return tuple(self._reader.scalars(vector, kind, field))

    def _constant(self, at: int) -> XnnConstant:
        offset, size, key = self._reader.fields("ConstantDataOffset", at)
        field = "ConstantDataOffset.named_key"
        return XnnConstant(self._reader.string(key, field) if key else None, size, offset)

    def _constant_of(self, number: int, field: str, at: int) -> XnnConstant | None:
        if number >= max(len(self._constants), 1):
            raise IndexRangeError(
                f"found constant {number} of {len(self._constants)}", field=field, offset=at
            )
        return self._constants[number] if number else None

    def _value(self, at: int) -> XnnValue:
        kind, table = self._reader.fields("XValue", at)
        if kind not in (_PLAIN, _QUANTISED) or not table:
            raise EnumError(
                f"found a value of the unknown kind {kind}", field="XValue.xvalue_union", offset=at
            )
        quantization = None
        if kind == _QUANTISED:
            tensor, scheme, scales = self._reader.fields("XNNQuantizedTensorValue", table)
            if not tensor:
                raise MissingFieldError(
                    "found none", field="XNNQuantizedTensorValue.tensor_value", offset=table
                )
            quantization = self._quantization(scheme, scales, table)
            table = tensor
        return self._tensor(table, quantization)

    def _tensor(self, table: int, quantization: XnnQuantization | None) -> XnnValue:
        dtype, _, dims, constant, external, flags, number, dynamic = self._reader.fields(
            "XNNTensorValue", table
        )
        if dtype not in _DATATYPES:
            raise EnumError(
                f"found the unknown datatype {dtype} of value {number}",
                field="XNNTensorValue.datatype",
                offset=table,
            )
        return XnnValue(
            id=number,
            dtype=_DATATYPES[dtype],
            shape=self._numbers(dims, "XNNTensorValue.dims"),
            flags=flags,
            external_id=None if external == _NONE else external,
            constant=self._constant_of(constant, "XNNTensorValue.constant_buffer_idx", table),
            quantization=quantization,
            dynamic_dtype=dynamic,
        )

    def _quantization(self, scheme: int, table: int, owner: int) -> XnnQuantization | None:
        if not scheme:
            return None
        if scheme >= len(_SCHEMES) or not table:
            raise EnumError(
                f"found scales of the unknown kind {scheme}",
                field="XNNQuantizedTensorValue.quant_params",
                offset=owner,
            )
        name = _SCHEMES[scheme]
        found = self._reader.fields(name, table)
        if name == "PerTensorQuant":
            return XnnQuantization("tensor", (found[0],), found[1])
        if name == "PerTokenDynamicQuant":
            return XnnQuantization("token", nonbatch_dims=found[0])
        scales = self._numbers(found[0], f"{name}.scale", "f32")
        stored = found[2] if name == "PerChannelQuant" else found[4]
        return XnnQuantization(
            "channel" if name == "PerChannelQuant" else "group",
            scales,
            channel_dim=found[1],
            group_size=0 if name == "PerChannelQuant" else found[2],
            scale_constant=self._constant_of(stored, f"{name}.scale_buffer_idx", table),
        )

    def _node(self, at: int) -> XnnNode:
        number, table, handle, limits = self._reader.fields("XNode", at)
        operator = _OPERATORS.get(number)
        if operator is None or not table:
            raise EnumError(
                f"found a node of the unknown kind {number}", field="XNode.xnode_union", offset=at
            )
        inputs: list[int] = []
        outputs: list[int] = []
        parameters: dict[str, int | float | tuple[int, ...]] = {}
        found = self._reader.fields(operator.table, table)
        for field, value in zip(operator.fields, found, strict=False):
            if not field.name.endswith("_id"):
                listed = field.kind.startswith("[")
                path = f"{operator.label}.{field.name}"
                parameters[field.name] = self._numbers(value, path) if listed else value
            elif field.name.startswith("output"):
                outputs.append(value)
            elif value != _NONE or field.name not in _OPTIONAL:
                inputs.append(value)
        if operator.joined:
            del inputs[operator.joined :]
        return XnnNode(
            *(operator, tuple(inputs), tuple(outputs), parameters),
            self._reader.fields("OutputMinMax", limits)[:2] if limits else None,  # type: ignore[arg-type]
            handle,
        )
