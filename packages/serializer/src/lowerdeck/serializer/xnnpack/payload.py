"""Decode untrusted payloads of XNNPACK delegates, and encode them."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lowerdeck.serializer.errors import (
    ContentError,
    IndexRangeError,
    MagicError,
    MissingFieldError,
    TruncatedError,
)
from lowerdeck.serializer.flatbuffer.alignment import round_up
from lowerdeck.serializer.flatbuffer.tables import TableReader, root_position
from lowerdeck.serializer.flatbuffer.wire import Format
from lowerdeck.serializer.flatbuffer.writer import Writer
from lowerdeck.serializer.xnnpack.graph import (
    XnnConstant,
    XnnEncoding,
    XnnGraph,
    XnnNode,
    XnnValue,
)
from lowerdeck.serializer.xnnpack.operators import (
    PAYLOAD_TABLES,
    SCALE_TABLES,
    XnnDatatype,
    XnnOperator,
)

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

BACKEND = "XnnpackBackend"
"""Id of the backend whose delegates have these payloads."""
_MAGIC = b"XH00"
_HEADER = struct.Struct("<4x4sHIIIQ")
"""Four zeros, the magic, header size, graph offset and size, constants offset and size."""
_IDENTIFIERS = (b"XN00", b"XN01")
_ALIGNMENT = 16
_NAMED = 0xFFFFFFFFFFFFFFFF
"""Offset that marks a constant in named data."""
_PLAIN, _QUANTISED = 1, 2
_SCHEMES = list(SCALE_TABLES)
_FORMAT = Format(PAYLOAD_TABLES)
_OPERATORS = {int(operator): operator for operator in XnnOperator}
_DATATYPES = {int(kind): kind for kind in XnnDatatype}


def decode_payload(data: ReadableBuffer) -> XnnGraph:
    """Return the graph in the payload of a delegate of ``XnnpackBackend``.

    Supports the payloads that ExecuTorch 1.4.1 reads: those with a header, with constants in the
    payload or in the file's named data, and bare graphs without constants.

    Args:
        data: The bytes of the delegate.

    Returns:
        The graph. Its tables are well-formed and its constants exist; :func:`verify_pte` checks
        whether the runtime can run it.

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
    """Decodes tables to a graph."""

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
        tables = self._reader.tables
        self._constants = tuple(map(self._constant, tables(constants, "XNNGraph.constant_data")))
        return XnnGraph(
            version=self._reader.string(version, "XNNGraph.version") if version else "",
            values=list(map(self._value, tables(values, "XNNGraph.xvalues"))),
            nodes=list(map(self._node, tables(nodes, "XNNGraph.xnodes"))),
            input_ids=list(self._numbers(inputs, "XNNGraph.input_ids")),
            output_ids=list(self._numbers(outputs, "XNNGraph.output_ids")),
            num_externs=externs,
            constants=list(self._constants),
            constant_data=data,
        )

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
            raise ContentError(
                f"found a value of kind {kind}, expected a known kind with a table",
                field="XValue.xvalue_union",
                offset=at,
            )
        scheme = scales = 0
        if kind == _QUANTISED:
            owner = table
            table, scheme, scales = self._reader.fields("XNNQuantizedTensorValue", owner)
            if not table:
                raise MissingFieldError(
                    "found none", field="XNNQuantizedTensorValue.tensor_value", offset=owner
                )
            if scheme >= len(_SCHEMES) or bool(scheme) != bool(scales):
                raise ContentError(
                    f"found scales of kind {scheme}, expected 0, or a known kind with a table",
                    field="XNNQuantizedTensorValue.quant_params",
                    offset=owner,
                )
        dtype, _, dims, constant, external, flags, number, dynamic = self._reader.fields(
            "XNNTensorValue", table
        )
        if dtype not in _DATATYPES:
            raise ContentError(
                f"found the unknown datatype {dtype} of value {number}",
                field="XNNTensorValue.datatype",
                offset=table,
            )
        expected = _DATATYPES[dtype].scheme
        if _SCHEMES[scheme] != expected:
            raise ContentError(
                f"found the scheme {_SCHEMES[scheme]!r} of the scales of XNNPACK value {number} "
                f"of {_DATATYPES[dtype].name}, expected {expected!r}",
                field="XNNQuantizedTensorValue.quant_params",
                offset=table,
            )
        return XnnValue(
            id=number,
            encoding=self._encoding(_DATATYPES[dtype], scales),
            shape=self._numbers(dims, "XNNTensorValue.dims"),
            flags=flags,
            external_id=None if external == XnnNode.NONE else external,
            constant=self._constant_of(constant, "XNNTensorValue.constant_buffer_idx", table),
            dynamic_dtype=dynamic,
        )

    def _encoding(self, dtype: XnnDatatype, table: int) -> XnnEncoding:
        if not dtype.scheme:
            return XnnEncoding(dtype)
        name = SCALE_TABLES[dtype.scheme]
        fields = self._reader.fields(name, table)
        if dtype.scheme == "tensor":
            return XnnEncoding(dtype, (fields[0],), fields[1])
        if dtype.scheme == "token":
            return XnnEncoding(dtype, nonbatch_dims=fields[0])
        is_group = dtype.scheme == "group"
        return XnnEncoding(
            dtype,
            self._numbers(fields[0], f"{name}.scale", "f32"),
            channel_dim=fields[1],
            group_size=fields[2] if is_group else 0,
            scale_constant=self._constant_of(
                fields[4 if is_group else 2], f"{name}.scale_buffer_idx", table
            ),
        )

    def _node(self, at: int) -> XnnNode:
        number, table, handle, limits = self._reader.fields("XNode", at)
        operator = _OPERATORS.get(number)
        if operator is None or not table:
            raise ContentError(
                f"found a node of kind {number}, expected a known kind with a table",
                field="XNode.xnode_union",
                offset=at,
            )
        values = self._reader.fields(operator.table, table)
        return XnnNode(
            operator,
            {
                field.name: self._numbers(value, f"{operator.label}.{field.name}")
                if field.is_offset
                else value
                for field, value in zip(operator.fields, values, strict=False)
            },
            tuple(self._reader.fields("OutputMinMax", limits)[:2]) if limits else None,
            handle,
        )


def encode_payload(graph: XnnGraph) -> bytes:
    """Return the payload of a delegate of ``XnnpackBackend``: a header, the graph, its constants.

    Args:
        graph: The graph. It is not verified; see :func:`verify_payload`. Each constant of a value
            must be an entry of ``graph.constants``.

    Example:
        >>> from lowerdeck.serializer import XnnGraph, decode_payload, encode_payload
        >>> decode_payload(encode_payload(XnnGraph(num_externs=2))).num_externs
        2
    """
    numbers = {constant: number for number, constant in enumerate(graph.constants)}
    pieces = Writer(_FORMAT).finish(
        "XNNGraph",
        {
            "version": graph.version,
            "xnodes": [_node_fields(node) for node in graph.nodes],
            "xvalues": [_value_fields(value, numbers) for value in graph.values],
            "num_externs": graph.num_externs,
            "input_ids": graph.input_ids,
            "output_ids": graph.output_ids,
            "constant_data": [
                {
                    "offset": entry.offset if entry.key is None else _NAMED,
                    "size": entry.size,
                    "named_key": entry.key,
                }
                for entry in graph.constants
            ],
        },
        _IDENTIFIERS[-1],
    )
    flat = b"".join(pieces)
    start = round_up(_HEADER.size, _ALIGNMENT)
    end = round_up(start + len(flat), _ALIGNMENT)
    header = _HEADER.pack(*(_MAGIC, _HEADER.size, start, len(flat), end, len(graph.constant_data)))
    padded = flat.ljust(end - start, b"\0")
    return b"".join([header.ljust(start, b"\0"), padded, graph.constant_data])


def _node_fields(node: XnnNode) -> dict[str, Any]:
    limits = node.output_range
    return {
        "xnode_union_type": int(node.operator),
        "xnode_union": (node.operator.table, node.fields),
        "debug_handle": node.debug_handle,
        "output_min_max": limits and {"output_min": limits[0], "output_max": limits[1]},
    }


def _value_fields(value: XnnValue, numbers: Mapping[XnnConstant, int]) -> dict[str, Any]:
    encoding, scheme = value.encoding, value.encoding.scheme
    tensor = {
        "datatype": int(value.dtype),
        "num_dims": len(value.shape),
        "dims": value.shape,
        "constant_buffer_idx": numbers[value.constant] if value.constant else 0,
        "external_id": XnnNode.NONE if value.external_id is None else value.external_id,
        "flags": value.flags,
        "id_out": value.id,
        "dq_datatype": value.dynamic_dtype,
    }
    if not scheme:
        union = ("XNNTensorValue", tensor)
        return {"xvalue_union_type": _PLAIN, "xvalue_union": union}
    stored = encoding.scale_constant
    scales = {
        "zero_point": encoding.zero_point,
        "channel_dim": encoding.channel_dim,
        "group_size": encoding.group_size,
        "num_nonbatch_dims": encoding.nonbatch_dims,
        "scale_buffer_idx": numbers[stored] if stored else 0,
        "num_scales": stored.size // (2 if scheme == "group" else 4) if stored else 0,
        "scale": encoding.scale if scheme == "tensor" else encoding.scales or None,
    }
    union = (
        "XNNQuantizedTensorValue",
        {
            "tensor_value": tensor,
            "quant_params_type": _SCHEMES.index(scheme),
            "quant_params": (SCALE_TABLES[scheme], scales),
        },
    )
    return {"xvalue_union_type": _QUANTISED, "xvalue_union": union}
