"""The tables of an XNNPACK payload, as plain data.

The facts are those of the published schema that the official runtime (ExecuTorch 1.4) reads:
numbers of union members and fields are part of the format and never change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeAlias

NONE = 0xFFFFFFFF
"""The id that stands for 'no value'."""
EXTERNAL_INPUT = 1
EXTERNAL_OUTPUT = 2
TRANSPOSE_WEIGHTS = 1
ALIGN_CORNERS = 8
KEEP_DIMS = 0x40
FLOAT32 = 1
MAX_RANK = 6
MAX_EXTERNALS = 4096


class FieldType(IntEnum):
    """How a field of a table is stored."""

    U32 = 0
    F32 = 1
    U32_VECTOR = 2


class NodeKind(IntEnum):
    """What a node computes: the number of its table in the union of nodes."""

    ADD = 1
    FULLY_CONNECTED = 2
    SOFTMAX = 3
    SIGMOID = 4
    STATIC_TRANSPOSE = 5
    CLAMP = 6
    CONV2D = 7
    DIV = 8
    STATIC_RESIZE_BILINEAR_2D = 9
    STATIC_CONSTANT_PAD = 10
    AVG_POOLING_2D = 11
    MINIMUM = 12
    DEPTHWISE_CONV2D = 13
    MAX_POOLING_2D = 14
    MULTIPLY = 15
    SUBTRACT = 16
    FLOOR = 17
    GLOBAL_AVG_POOLING_2D = 19
    STATIC_RESHAPE = 20
    SQUARE_ROOT = 22
    CEILING = 23
    HARDSWISH = 24
    LEAKY_RELU = 25
    MAXIMUM = 26
    NEGATE = 27
    SQUARE = 28
    ELU = 29
    ABS = 30
    PRELU = 31
    CONCATENATE2 = 32
    CONCATENATE3 = 33
    CONCATENATE4 = 34
    STATIC_SLICE = 35
    BATCH_MATRIX_MULTIPLY = 37
    CONCATENATE5 = 38
    CONV_TRANSPOSE_2D = 39
    RECIPROCAL_SQUARE_ROOT = 40
    LOG = 41
    GELU = 42
    TANH = 43
    EXP = 44
    SIN = 45
    COPY = 46
    COS = 47


Layout: TypeAlias = tuple[tuple[str, FieldType], ...]

_U32, _F32, _VECTOR = FieldType.U32, FieldType.F32, FieldType.U32_VECTOR


def _numbers(names: str) -> Layout:
    return tuple((name, _U32) for name in names.split())


_UNARY = _numbers("input_id output_id flags")
_BINARY = _numbers("input1_id input2_id output_id flags")
_CONCATENATE = _numbers("axis input1_id input2_id input3_id input4_id output_id flags input5_id")
_CONVOLUTION = _numbers(
    "padding_top padding_right padding_bottom padding_left kernel_height kernel_width "
    "subsampling_height subsampling_width dilation_height dilation_width group_input_channels "
    "group_output_channels groups adjustment_height adjustment_width "
    "input1_id filter_id bias_id output_id flags"
)
_POOLING = _numbers(
    "padding_top padding_right padding_bottom padding_left pooling_height pooling_width "
    "stride_height stride_width dilation_height dilation_width input_id output_id flags"
)

UNARY_KINDS = frozenset(
    {
        *(NodeKind.SOFTMAX, NodeKind.SIGMOID, NodeKind.CLAMP, NodeKind.FLOOR),
        *(NodeKind.GLOBAL_AVG_POOLING_2D, NodeKind.SQUARE_ROOT, NodeKind.CEILING),
        *(NodeKind.HARDSWISH, NodeKind.NEGATE, NodeKind.SQUARE, NodeKind.ABS),
        *(NodeKind.RECIPROCAL_SQUARE_ROOT, NodeKind.LOG, NodeKind.GELU, NodeKind.TANH),
        *(NodeKind.EXP, NodeKind.SIN, NodeKind.COPY, NodeKind.COS),
    }
)
BINARY_KINDS = frozenset(
    {
        *(NodeKind.ADD, NodeKind.DIV, NodeKind.MINIMUM, NodeKind.MULTIPLY, NodeKind.SUBTRACT),
        *(NodeKind.MAXIMUM, NodeKind.PRELU, NodeKind.BATCH_MATRIX_MULTIPLY),
    }
)
CONCATENATE_KINDS = (
    *(NodeKind.CONCATENATE2, NodeKind.CONCATENATE3),
    *(NodeKind.CONCATENATE4, NodeKind.CONCATENATE5),
)
"""The kinds that join 2, 3, 4 and 5 inputs, in that order."""
LAYOUTS: Mapping[NodeKind, Layout] = {
    **dict.fromkeys(UNARY_KINDS, _UNARY),
    **dict.fromkeys(BINARY_KINDS, _BINARY),
    **dict.fromkeys(CONCATENATE_KINDS, _CONCATENATE),
    NodeKind.FULLY_CONNECTED: _numbers("input1_id filter_id bias_id output_id flags"),
    NodeKind.CONV2D: _CONVOLUTION,
    NodeKind.DEPTHWISE_CONV2D: _CONVOLUTION,
    NodeKind.CONV_TRANSPOSE_2D: _CONVOLUTION,
    NodeKind.AVG_POOLING_2D: _POOLING,
    NodeKind.MAX_POOLING_2D: _POOLING,
    NodeKind.STATIC_TRANSPOSE: (
        *_numbers("num_dims"),
        ("perm", _VECTOR),
        *_numbers("input_id output_id flags"),
    ),
    NodeKind.STATIC_RESHAPE: (
        *_numbers("num_dims"),
        ("new_shape", _VECTOR),
        *_numbers("input_id output_id flags"),
    ),
    NodeKind.STATIC_SLICE: (
        *_numbers("num_dims"),
        *(("offsets", _VECTOR), ("sizes", _VECTOR)),
        *_numbers("input_id output_id flags"),
    ),
    NodeKind.STATIC_CONSTANT_PAD: (
        *(("pre_paddings", _VECTOR), ("post_paddings", _VECTOR), ("padding_value", _F32)),
        *_numbers("input_id output_id flags"),
    ),
    NodeKind.STATIC_RESIZE_BILINEAR_2D: _numbers("new_height new_width input_id output_id flags"),
    NodeKind.LEAKY_RELU: (("negative_slope", _F32), *_numbers("input_id output_id flags")),
    NodeKind.ELU: (("alpha", _F32), *_numbers("input_id output_id flags")),
}
"""The fields of each kind's table, in the order of their numbers."""


@dataclass(slots=True)
class Value:
    """One tensor of the graph.

    Attributes:
        id: Its number; nodes refer to it.
        dims: Sizes in the order of memory; hints only, unless the value is a constant.
        constant: Number of its data in ``Graph.constants``, or 0 for none.
        external_id: Position among the arguments of the delegate call, or ``NONE``.
        flags: ``EXTERNAL_INPUT`` or ``EXTERNAL_OUTPUT`` or 0.
    """

    id: int
    dims: tuple[int, ...]
    constant: int = 0
    external_id: int = NONE
    flags: int = 0


@dataclass(frozen=True, slots=True)
class Node:
    """One operation of the graph.

    Attributes:
        kind: What it computes.
        fields: The fields of its table by name; those left out are 0.
        output_range: Smallest and largest output, where the node clamps its output.
        debug_handle: What the runtime's log calls this node.
    """

    kind: NodeKind
    fields: Mapping[str, int | float | tuple[int, ...]]
    output_range: tuple[float, float] | None = None
    debug_handle: int = 0


@dataclass(frozen=True, slots=True)
class Constant:
    """Where the bytes of a constant lie.

    Attributes:
        key: The entry of the file's named data; empty for bytes inside the blob.
        size: Number of bytes.
        offset: Where they begin in the blob's constant segment, if they are inside.
    """

    key: str
    size: int
    offset: int = 0


@dataclass(slots=True)
class Graph:
    """A whole payload.

    Attributes:
        values: All tensors.
        nodes: All operations, in an order in which they can run.
        constants: Data of constants; number 0 is reserved and means none.
        input_ids: Ids of the external inputs, in order of the arguments.
        output_ids: Ids of the external outputs, in order of the arguments.
        num_externs: Number of arguments of the delegate call, inputs and outputs together.
        channels_last: Positions of the arguments that the program holds with channels last. The
            official runtime sees it from the program's tensors; for other readers it stands in
            the version's text, which the official runtime does not read.
    """

    values: list[Value] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    constants: list[Constant] = field(default_factory=lambda: [Constant("", 0)])
    input_ids: list[int] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    num_externs: int = 0
    channels_last: set[int] = field(default_factory=set)
