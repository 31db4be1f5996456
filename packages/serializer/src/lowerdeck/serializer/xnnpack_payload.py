"""The payload of an XNNPACK delegate as plain data, read without trust and without torch.

Facts: the published schema that ExecuTorch 1.4.1 reads (identifiers ``XN00`` and ``XN01``).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from lowerdeck.serializer.errors import ContentError

T = TypeVar("T")
MAGIC = b"XH00"
NONE = 0xFFFFFFFF
"""The id that stands for 'no value'."""

KINDS = (
    "",
    *("Add", "FullyConnected", "Softmax", "Sigmoid", "StaticTranspose", "Clamp", "Conv2d", "Div"),
    *("StaticResizeBilinear2D", "StaticConstantPad", "AvgPooling2d", "Minimum"),
    *("DepthwiseConv2d", "MaxPooling2d", "Multiply", "Subtract", "Floor", "Convert"),
    *("GlobalAvgPooling2d", "StaticReshape", "ArgMaxPooling2d", "SquareRoot", "Ceiling"),
    *("Hardswish", "LeakyReLU", "Maximum", "Negate", "Square", "ELU", "Abs", "PReLU"),
    *("Concatenate2", "Concatenate3", "Concatenate4", "StaticSlice"),
    *("ScaledDotProductAttention", "BatchMatrixMultiply", "Concatenate5", "ConvTranspose2d"),
    *("ReciprocalSquareRoot", "Log", "Gelu", "Tanh", "Exp", "Sin", "Copy", "Cos"),
)
"""What nodes compute, by the number of their table in the union of nodes."""

# Fields in the order of their numbers; V marks a list, F a float.
_BINARY = "input1_id input2_id output_id flags"
_JOIN = "axis input1_id input2_id input3_id input4_id output_id flags input5_id"
_CONVOLUTION = (
    "padding_top padding_right padding_bottom padding_left kernel_height kernel_width "
    "subsampling_height subsampling_width dilation_height dilation_width group_input_channels "
    "group_output_channels groups adjustment_height adjustment_width input1_id filter_id bias_id "
    "output_id flags"
)
_POOLING = (
    "padding_top padding_right padding_bottom padding_left pooling_height pooling_width "
    "stride_height stride_width dilation_height dilation_width input_id output_id flags"
)
_FIELDS = {
    **dict.fromkeys(
        ("Add", "Div", "Minimum", "Multiply", "Subtract", "Maximum", "PReLU"), _BINARY
    ),
    "BatchMatrixMultiply": _BINARY,
    **dict.fromkeys(("Concatenate2", "Concatenate3", "Concatenate4", "Concatenate5"), _JOIN),
    **dict.fromkeys(("Conv2d", "DepthwiseConv2d", "ConvTranspose2d"), _CONVOLUTION),
    **dict.fromkeys(("AvgPooling2d", "MaxPooling2d"), _POOLING),
    "FullyConnected": "input1_id filter_id bias_id output_id flags",
    "ArgMaxPooling2d": "padding_top padding_right padding_bottom padding_left pooling_height "
    "pooling_width input_id output_value_id output_index_id flags",
    "StaticTranspose": "num_dims perm:V input_id output_id flags",
    "StaticReshape": "num_dims new_shape:V input_id output_id flags",
    "StaticSlice": "num_dims offsets:V sizes:V input_id output_id flags",
    "StaticConstantPad": "pre_paddings:V post_paddings:V padding_value:F input_id output_id flags",
    "StaticResizeBilinear2D": "new_height new_width input_id output_id flags",
    "LeakyReLU": "negative_slope:F input_id output_id flags",
    "ELU": "alpha:F input_id output_id flags",
    "ScaledDotProductAttention": "query_id key_id value_id scale_id mask_id output_id flags",
}
_UNARY = "input_id output_id flags"


@dataclass(frozen=True, slots=True)
class XnnpackConstant:
    """Where the bytes of a constant are.

    Attributes:
        key: The entry of the file's named data, or None for bytes inside the payload.
        size: Number of bytes.
        offset: Where they begin in the payload's constants, if they are inside.
    """

    key: str | None
    size: int
    offset: int


@dataclass(frozen=True, slots=True)
class XnnpackValue:
    """One tensor of the graph.

    Attributes:
        id: Its number; nodes refer to it.
        dtype: XNNPACK's number of the datatype.
        quantized: Number of the table of scales, 0 for none.
        dims: Sizes in the order of memory.
        constant: Number of its data, 0 for none.
        external_id: Position among the arguments of the delegate call, or ``NONE``.
        flags: 1 for an input, 2 for an output.
        scales: Scales that stand in the payload.
        scale_constant: Number of the constant that holds the scales, 0 for none.
        channel_dim: Dimension of the channels that have scales.
        group: Elements that share one scale, 0 where a whole channel does.
    """

    id: int
    dtype: int
    quantized: int
    dims: tuple[int, ...]
    constant: int
    external_id: int
    flags: int
    scales: tuple[float, ...] = ()
    scale_constant: int = 0
    channel_dim: int = 0
    group: int = 0


@dataclass(frozen=True, slots=True)
class XnnpackNode:
    """One operation: what it computes, and its fields by name."""

    kind: str
    fields: dict[str, int]
    lists: dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class XnnpackPayload:
    """A whole payload.

    Attributes:
        values: All tensors.
        nodes: All operations.
        constants: Data of constants; number 0 is reserved.
        num_externs: Number of arguments that the graph declares.
        inside: Number of bytes of the payload's own constants.
    """

    values: list[XnnpackValue]
    nodes: list[XnnpackNode]
    constants: list[XnnpackConstant]
    num_externs: int
    inside: int


def damaged(reason: str) -> ContentError:
    """Return the error that says what is wrong with a payload."""
    return ContentError(reason, field="XNNPACK payload")


def read_xnnpack(blob: memoryview) -> XnnpackPayload:
    """Return what a payload holds.

    Args:
        blob: The bytes of a delegate of ``XnnpackBackend``.

    Raises:
        FormatError: It is truncated or damaged.
    """
    start, end, inside = 0, len(blob), 0
    if blob[4:8] == MAGIC:
        if len(blob) < 30:
            raise damaged(f"found {len(blob)} bytes of an XNNPACK payload, expected 30")
        _, start, size, constants, inside = struct.unpack_from("<HIIIQ", blob, 8)
        end = start + size
        if end > len(blob) or size < 8 or constants < end or constants + inside > len(blob):
            raise damaged(
                f"found {len(blob)} bytes of an XNNPACK payload, expected the graph at {start} to "
                f"{end} and the constants at {constants} to {constants + inside} behind it"
            )
    flat = _Flat(blob[start:end])
    if bytes(flat.data[4:8]) not in (b"XN00", b"XN01"):
        raise damaged(f"found the version {bytes(flat.data[4:8])!r} of an XNNPACK graph")
    root = flat.follow(0)
    return XnnpackPayload(
        flat.tables(root, 2, lambda table: _value(flat, table)),
        flat.tables(root, 1, lambda table: _node(flat, table)),
        flat.tables(root, 8, lambda table: _constant(flat, table)),
        flat.get(root, 3),
        inside,
    )


class _Flat:
    """Reads numbers of a flatbuffer, and refuses those that lie outside it."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        # Tables may be shared: what is read is bounded by what could be there once.
        self._left = 4 * len(data) + 1024

    def number(self, kind: str, at: int) -> int:
        self._left -= 1
        if at < 0 or self._left < 0:
            raise damaged(f"found an offset that leads to {at} in an XNNPACK graph")
        try:
            return int(struct.unpack_from(f"<{kind}", self.data, at)[0])
        except struct.error as error:
            raise damaged(f"found an XNNPACK graph that ends before {at}") from error

    def follow(self, at: int) -> int:
        return at + self.number("I", at)

    def field(self, table: int, slot: int) -> int:
        """Return where a field is, or 0 where the table leaves it out."""
        vtable = table - self.number("i", table)
        if 4 + 2 * slot >= self.number("H", vtable):
            return 0
        offset = self.number("H", vtable + 4 + 2 * slot)
        return table + offset if offset else 0

    def get(self, table: int, slot: int, kind: str = "I") -> int:
        at = self.field(table, slot)
        return self.number(kind, at) if at else 0

    def table(self, table: int, slot: int) -> int:
        at = self.field(table, slot)
        if not at:
            raise damaged(f"found no field {slot} in the XNNPACK table at {table}")
        return self.follow(at)

    def items(self, table: int, slot: int, code: str = "I") -> tuple[int, ...]:
        start, count = self._vector(table, slot, 4)
        return struct.unpack_from(f"<{count}{code}", self.data, start)

    def tables(self, table: int, slot: int, read: Callable[[int], T]) -> list[T]:
        start, count = self._vector(table, slot, 4)
        return [read(self.follow(start + 4 * position)) for position in range(count)]

    def text(self, table: int, slot: int) -> str | None:
        if not self.field(table, slot):
            return None
        start, count = self._vector(table, slot, 1)
        try:
            return bytes(self.data[start : start + count]).decode()
        except UnicodeDecodeError as error:
            # The runtime's binding ends the process when it reports such a name.
            raise damaged(f"found a name at {start} that is not UTF-8") from error

    def _vector(self, table: int, slot: int, width: int) -> tuple[int, int]:
        at = self.field(table, slot)
        if not at:
            return 0, 0
        start = self.follow(at)
        count = self.number("I", start)
        self._left -= count
        if self._left < 0 or start + 4 + width * count > len(self.data):
            raise damaged(f"found a list of {count} items at {start} of an XNNPACK graph")
        return start + 4, count


def _constant(flat: _Flat, table: int) -> XnnpackConstant:
    return XnnpackConstant(flat.text(table, 2), flat.get(table, 1, "Q"), flat.get(table, 0, "Q"))


def _value(flat: _Flat, table: int) -> XnnpackValue:
    union, at = flat.get(table, 0, "B"), flat.table(table, 1)
    if union not in (1, 2):
        raise damaged(f"found an XNNPACK value of the unknown kind {union}")
    quantized, more = 0, {}
    if union == 2:
        quantized = flat.get(at, 1, "B")
        if quantized:
            more = _scales(flat, quantized, flat.table(at, 2))
        at = flat.table(at, 0)
    return XnnpackValue(
        *(flat.get(at, 6), flat.get(at, 0, "h"), quantized, flat.items(at, 2)),
        *(flat.get(at, 3), flat.get(at, 4), flat.get(at, 5)),
        **more,
    )


def _scales(flat: _Flat, kind: int, at: int) -> dict[str, Any]:
    """Return the scales of channels (kind 1) and of groups (kind 4)."""
    if kind not in (1, 4):
        return {}
    return {
        "scales": flat.items(at, 0, "f"),
        "channel_dim": flat.get(at, 1, "i"),
        "scale_constant": flat.get(at, 2 if kind == 1 else 4),
        "group": flat.get(at, 2, "i") if kind == 4 else 0,
    }


def _node(flat: _Flat, table: int) -> XnnpackNode:
    number, at = flat.get(table, 0, "B"), flat.table(table, 1)
    if not 0 < number < len(KINDS):
        raise damaged(f"found an XNNPACK node of the unknown kind {number}")
    fields, lists = {}, {}
    for slot, field in enumerate(_FIELDS.get(KINDS[number], _UNARY).split()):
        name, _, form = field.partition(":")
        if form == "V":
            lists[name] = flat.items(at, slot)
        elif not form:
            fields[name] = flat.get(at, slot)
    return XnnpackNode(KINDS[number], fields, lists)
