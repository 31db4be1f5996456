"""Payloads of XNNPACK made by hand, right ones and wrong ones, without torch."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

from lowerdeck.serializer import (
    DelegateCall,
    NamedData,
    Program,
    ScalarType,
    XnnDatatype,
    XnnOperator,
)
from lowerdeck.serializer.flatbuffer.wire import SCALAR_CODES, SCALAR_SIZES
from lowerdeck.serializer.xnnpack.operators import PAYLOAD_TABLES
from lowerdeck_files import programs

NONE = 0xFFFFFFFF
Table = dict[str, Any]


class Flat:
    """Writes nested dictionaries as tables; what is one object there is one object in the file.

    The file grows from its end, so that what refers to something comes before it; a position is
    told by how far it is from the end.
    """

    def __init__(self, identifier: bytes = b"XN01") -> None:
        self._identifier = identifier
        self._parts: list[bytes] = []
        self._size = 0
        self._seen: dict[int, int] = {}
        self._kept: list[object] = []

    def finish(self, root: Table) -> bytes:
        """Return the whole flatbuffer."""
        table = self._table("XNNGraph", root)
        start = self._push(bytes(4) + self._identifier, 8)
        self._parts[-1] = struct.pack("<I", start - table) + self._identifier
        return b"".join(reversed(self._parts))

    def _push(self, data: bytes, alignment: int) -> int:
        """Put bytes before all others, and return where they are."""
        padding = -(self._size + len(data)) % alignment
        self._parts += [bytes(padding), data]
        self._size += padding + len(data)
        return self._size

    def _table(self, name: str, values: Table) -> int:
        fields = [field for field in PAYLOAD_TABLES[name] if field.name in values]
        offsets: dict[str, int] = {}
        end = 4
        for field in sorted(fields, key=lambda field: -field.size):
            offsets[field.name] = end = -(-end // field.size) * field.size
            end += field.size
        end += -end % 8
        targets = {
            field.name: self._object(field.kind, values[field.name])
            for field in fields
            if field.is_offset
        }
        slots = [offsets.get(field.name, 0) for field in PAYLOAD_TABLES[name]]
        vtable = struct.pack(f"<{2 + len(slots)}H", 4 + 2 * len(slots), end, *slots)
        table = bytearray(struct.pack("<i", len(vtable)) + bytes(end - 4))
        at = self._push(bytes(end), 8)
        for field in fields:
            offset = offsets[field.name]
            if field.is_offset:
                struct.pack_into("<I", table, offset, at - offset - targets[field.name])
            else:
                struct.pack_into(f"<{field.code}", table, offset, values[field.name])
        self._parts[-1] = bytes(table)
        self._push(vtable, 2)
        return at

    def _object(self, kind: str, value: Any) -> int:
        if id(value) not in self._seen:
            self._kept.append(value)
            self._seen[id(value)] = self._written(kind, value)
        return self._seen[id(value)]

    def _written(self, kind: str, value: Any) -> int:
        if kind == "union":
            name, table = value
            self._kept.append(table)
            if id(table) not in self._seen:
                self._seen[id(table)] = self._table(name, table)
            return self._seen[id(table)]
        if kind == "str":
            return self._push(
                struct.pack("<I", len(value)) + value + b"\0" * (4 - len(value) % 4), 4
            )
        if not kind.startswith("["):
            return self._table(kind, value)
        item = kind[1:-1]
        head = struct.pack("<I", len(value))
        if item in SCALAR_SIZES:
            return self._push(head + struct.pack(f"<{len(value)}{SCALAR_CODES[item]}", *value), 4)
        targets = [self._object(item, one) for one in value]
        at = self._push(bytes(4 + 4 * len(value)), 4)
        offsets = [at - 4 - 4 * number - target for number, target in enumerate(targets)]
        self._parts[-1] = head + struct.pack(f"<{len(value)}I", *offsets)
        return at


def payload(root: Table, constants: bytes = b"", identifier: bytes = b"XN01") -> bytes:
    """Return a payload with its header."""
    graph = Flat(identifier).finish(root)
    graph += bytes(-len(graph) % 16)
    header = struct.pack(
        "<4x4sHIIIQ", b"XH00", 30, 32, len(graph), 32 + len(graph), len(constants)
    )
    return header.ljust(32, b"\0") + graph + constants


def value(number: int, dims: Sequence[int] = (2, 3), **fields: Any) -> Table:
    """Return a float32 value, or one with scales if ``quant`` names their table and gives it."""
    quant = fields.pop("quant", None)
    table = {
        "datatype": int(XnnDatatype.FP32),
        "num_dims": len(dims),
        "dims": list(dims),
        "external_id": NONE,
        "id_out": number,
    } | fields
    if quant is None:
        return {"xvalue_union_type": 1, "xvalue_union": ("XNNTensorValue", table)}
    kind, scales = quant
    number = (
        *("", "PerChannelQuant", "PerTensorQuant", "PerTokenDynamicQuant", "PerChannelGroupQuant"),
    ).index(kind)
    quantised = {
        "tensor_value": table,
        "quant_params_type": number,
        "quant_params": (kind, scales),
    }
    return {"xvalue_union_type": 2, "xvalue_union": ("XNNQuantizedTensorValue", quantised)}


def node(operator: XnnOperator, **fields: Any) -> Table:
    """Return a node; ``limits`` are its smallest and largest output."""
    limits = fields.pop("limits", None)
    table = {"xnode_union_type": int(operator), "xnode_union": (operator.table, fields)}
    if limits is not None:
        table["output_min_max"] = dict(zip(("output_min", "output_max"), limits, strict=True))
    return table


def graph(
    values: Sequence[Table],
    nodes: Sequence[Table],
    constants: Sequence[Mapping[str, Any]] = (),
    **fields: Any,
) -> Table:
    """Return a graph of two arguments, a constant at number 1 and the following."""
    return {
        "version": b"0",
        "xnodes": list(nodes),
        "xvalues": list(values),
        "num_externs": 2,
        "input_ids": [0],
        "output_ids": [1],
        "constant_data": [{"size": 0}, *constants],
    } | fields


def relu() -> Table:
    """Return a graph that clamps its input."""
    values = [value(0, external_id=0, flags=1), value(1, external_id=1, flags=2)]
    return graph(values, [node(XnnOperator.CLAMP, input_id=0, output_id=1, limits=(0.0, 1.0))])


def convolution(**fields: Any) -> Table:
    """Return a graph of an int8 convolution, its scales inside the graph."""
    per_tensor = ("PerTensorQuant", {"scale": 0.5, "zero_point": -3})
    kinds = {"datatype": int(XnnDatatype.QINT8), "quant": per_tensor}
    filters = ("PerChannelQuant", {"scale": [0.5, 0.25], "num_scales": 2})
    bias = ("PerChannelQuant", {"scale": [1.0, 1.0], "num_scales": 2})
    types = int(XnnDatatype.QCINT8), int(XnnDatatype.QCINT32)
    values = [
        value(0, (1, 4, 4, 3), external_id=0, flags=1, **kinds),
        value(1, (1, 4, 4, 2), external_id=1, flags=2, **kinds),
        value(2, (2, 3, 3, 3), datatype=types[0], constant_buffer_idx=1, quant=filters),
        value(3, (2,), datatype=types[1], constant_buffer_idx=2, quant=bias),
    ]
    sides = {"kernel": 3, "subsampling": 1, "dilation": 1}
    convolve = {
        **{f"padding_{side}": 1 for side in ("top", "right", "bottom", "left")},
        **{f"{name}_{side}": n for name, n in sides.items() for side in ("height", "width")},
        "group_input_channels": 3,
        "group_output_channels": 2,
        "groups": 1,
        "input1_id": 0,
        "filter_id": 2,
        "bias_id": 3,
        "output_id": 1,
    } | fields
    constants = [{"size": 54, "offset": 0}, {"size": 8, "offset": 56}]
    return graph(values, [node(XnnOperator.CONV2D, **convolve)], constants)


def linear(**fields: Any) -> Table:
    """Return a graph of a linear layer of 4-bit weights in named data, its scales as well."""
    groups = {"group_size": 32, "scale_buffer_idx": 2, "num_scales": 4}
    grouped, token = (
        ("PerChannelGroupQuant", groups),
        ("PerTokenDynamicQuant", {"num_nonbatch_dims": 1}),
    )
    types = int(XnnDatatype.QDINT8), int(XnnDatatype.QBINT4)
    values = [
        value(0, (1, 32), external_id=0, flags=1),
        value(1, (1, 4), external_id=1, flags=2),
        value(2, (1, 32), datatype=types[0], quant=token),
        value(3, (4, 32), datatype=types[1], constant_buffer_idx=1, quant=grouped),
    ]
    nodes = [
        node(XnnOperator.CONVERT, input_id=0, output_id=2),
        node(
            XnnOperator.FULLY_CONNECTED,
            **{"input1_id": 2, "filter_id": 3, "bias_id": NONE, "output_id": 1} | fields,
        ),
    ]
    constants = [
        {"size": 64, "offset": 2**64 - 1, "named_key": b"weight"},
        {"size": 8, "offset": 2**64 - 1, "named_key": b"scales"},
    ]
    return graph(values, nodes, constants)


NAMED = {"weight": 64, "scales": 8}


def program(
    blob: bytes,
    kinds: Sequence[ScalarType] = (ScalarType.FLOAT, ScalarType.FLOAT),
    sizes: Sequence[int] = (2, 3),
    named: Mapping[str, int] = NAMED,
) -> Program:
    """Return a program of one call of a delegate."""
    count = len(kinds)
    made: Program = programs.program(
        [programs.tensor(sizes, kind, 1 << 10 << place) for place, kind in enumerate(kinds)],
        DelegateCall(0, list(range(count))),
        memory=1 << 14,
        inputs=range(count - 1),
        outputs=[count - 1],
    )
    made.named_data = [NamedData(key, bytes(size)) for key, size in named.items()]
    programs.add_delegates(made, blob, backend="XnnpackBackend")
    return made
