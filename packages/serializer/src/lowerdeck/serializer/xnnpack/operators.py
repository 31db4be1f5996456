"""The tables, operators and data types of an XNNPACK payload.

The source is the schema that ExecuTorch 1.4.1 publishes and reads (identifiers ``XN00`` and
``XN01``). The numbers of union members and the order of fields are part of the format.
"""

from __future__ import annotations

from enum import IntEnum

from lowerdeck.serializer.flatbuffer.wire import Field, parse_fields

_UNARY = "input_id:u32 output_id:u32 flags:u32"
_NODE_TABLES: dict[str, tuple[Field, ...]] = {
    name: parse_fields(text)
    for name, text in {
        "Unary": _UNARY,
        "Binary": "input1_id:u32 input2_id:u32 output_id:u32 flags:u32",
        "Concatenate": "axis:u32 input1_id:u32 input2_id:u32 input3_id:u32 input4_id:u32"
        " output_id:u32 flags:u32 input5_id:u32",
        "FullyConnected": "input1_id:u32 filter_id:u32 bias_id:u32 output_id:u32 flags:u32",
        "Convolution": "padding_top:u32 padding_right:u32 padding_bottom:u32 padding_left:u32"
        " kernel_height:u32 kernel_width:u32 subsampling_height:u32 subsampling_width:u32"
        " dilation_height:u32 dilation_width:u32 group_input_channels:u32"
        " group_output_channels:u32 groups:u32 adjustment_height:u32 adjustment_width:u32"
        " input1_id:u32 filter_id:u32 bias_id:u32 output_id:u32 flags:u32",
        "Pooling": "padding_top:u32 padding_right:u32 padding_bottom:u32 padding_left:u32"
        " pooling_height:u32 pooling_width:u32 stride_height:u32 stride_width:u32"
        f" dilation_height:u32 dilation_width:u32 {_UNARY}",
        "ArgMax": "padding_top:u32 padding_right:u32 padding_bottom:u32 padding_left:u32"
        " pooling_height:u32 pooling_width:u32 input_id:u32 output_value_id:u32"
        " output_index_id:u32 flags:u32",
        "Transpose": f"num_dims:u32 perm:[u32] {_UNARY}",
        "Reshape": f"num_dims:u32 new_shape:[u32] {_UNARY}",
        "Slice": f"num_dims:u32 offsets:[u32] sizes:[u32] {_UNARY}",
        "Pad": f"pre_paddings:[u32] post_paddings:[u32] padding_value:f32 {_UNARY}",
        "Resize": f"new_height:u32 new_width:u32 {_UNARY}",
        "LeakyReLU": f"negative_slope:f32 {_UNARY}",
        "ELU": f"alpha:f32 {_UNARY}",
        "Attention": "query_id:u32 key_id:u32 value_id:u32 scale_id:u32 mask_id:u32"
        " output_id:u32 flags:u32",
    }.items()
}

PAYLOAD_TABLES: dict[str, tuple[Field, ...]] = {
    **_NODE_TABLES,
    "XNNGraph": parse_fields(
        "version:str xnodes:[XNode] xvalues:[XValue] num_externs:u32 input_ids:[u32]"
        " output_ids:[u32] constant_buffer:[Buffer] mem_buffer_sizes:[u32]"
        " constant_data:[ConstantDataOffset]"
    ),
    "ConstantDataOffset": parse_fields("offset:u64 size:u64 named_key:str"),
    "XNode": parse_fields(
        "xnode_union_type:u8 xnode_union:union debug_handle:u32 output_min_max:OutputMinMax"
    ),
    "OutputMinMax": parse_fields("output_min:f32 output_max:f32"),
    "XValue": parse_fields("xvalue_union_type:u8 xvalue_union:union"),
    "XNNTensorValue": parse_fields(
        "datatype:i16 num_dims:u32 dims:[u32] constant_buffer_idx:u32 external_id:u32 flags:u32"
        " id_out:u32 dq_datatype:i16"
    ),
    "XNNQuantizedTensorValue": parse_fields(
        "tensor_value:XNNTensorValue quant_params_type:u8 quant_params:union"
    ),
    "PerChannelQuant": parse_fields(
        "scale:[f32] channel_dim:i32 scale_buffer_idx:u32 num_scales:u32"
    ),
    "PerTensorQuant": parse_fields("scale:f32 zero_point:i32"),
    "PerTokenDynamicQuant": parse_fields("num_nonbatch_dims:i32"),
    "PerChannelGroupQuant": parse_fields(
        "scale:[f32] channel_dim:i32 group_size:i32 scale_bf16:[u16] scale_buffer_idx:u32"
        " num_scales:u32"
    ),
}
"""The tables of a payload; the root is ``XNNGraph``."""


class XnnDatatype(IntEnum):
    """Type of the elements of a value, by XNNPACK's numbers.

    ``Q`` is one scale for the tensor, ``QC`` one for each channel, ``QB`` one for each group,
    ``QD`` scales computed at run time; ``QP`` and ``PFP`` are packed formats of some processors.
    """

    FP32 = 1
    FP16 = 2
    QINT8 = 3
    QUINT8 = 4
    QINT32 = 5
    QCINT8 = 6
    QCINT32 = 7
    QCINT4 = 8
    QDINT8 = 9
    QBINT4 = 10
    QPINT8 = 11
    INT32 = 12
    PFP32 = 13
    BF16 = 14

    @property
    def bits(self) -> int:
        """Return the number of bits that one element takes."""
        return _BITS[self]

    @property
    def scheme(self) -> str:
        """Return the scale granularity: ``"tensor"``, ``"channel"``, ``"group"`` or ``"token"``.

        The result is ``""`` for types without scales and for packed types.
        """
        return _SCHEMES.get(self, "")


_BITS = {
    kind: 4
    if "INT4" in kind.name
    else 8
    if "INT8" in kind.name
    else 16
    if "16" in kind.name
    else 32
    for kind in XnnDatatype
}
_SCHEMES = {
    **dict.fromkeys((XnnDatatype.QINT8, XnnDatatype.QUINT8, XnnDatatype.QINT32), "tensor"),
    **dict.fromkeys((XnnDatatype.QCINT8, XnnDatatype.QCINT32, XnnDatatype.QCINT4), "channel"),
    XnnDatatype.QBINT4: "group",
    XnnDatatype.QDINT8: "token",
}
SCALE_TABLES = {
    "": "",
    "channel": "PerChannelQuant",
    "tensor": "PerTensorQuant",
    "token": "PerTokenDynamicQuant",
    "group": "PerChannelGroupQuant",
}
"""The table of each scheme's scales, in the order of their union."""


class XnnOperator(IntEnum):
    """Operator of a node: the number of its table in the union of nodes."""

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
    CONVERT = 18
    GLOBAL_AVG_POOLING_2D = 19
    STATIC_RESHAPE = 20
    ARG_MAX_POOLING_2D = 21
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
    SCALED_DOT_PRODUCT_ATTENTION = 36
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

    __hash__ = int.__hash__  # Enum's is Python code.

    @property
    def label(self) -> str:
        """Return the name in the schema, such as ``"Conv2d"``."""
        plain = "".join(part.capitalize() for part in self.name.split("_"))
        return _LABELS.get(plain, plain)

    @property
    def table(self) -> str:
        """Return the key of its fields in ``PAYLOAD_TABLES``; several operators may share it."""
        return _TABLES.get(self, "Unary")

    @property
    def fields(self) -> tuple[Field, ...]:
        """Return the name and kind of each field of its table, in id order."""
        return _NODE_TABLES[self.table]

    @property
    def joined(self) -> int:
        """Return the number of concatenated inputs, 0 for other operators."""
        return int(self.label[-1]) if self.table == "Concatenate" else 0


_LABELS = {
    "StaticResizeBilinear2d": "StaticResizeBilinear2D",
    "LeakyRelu": "LeakyReLU",
    "Elu": "ELU",
    "Prelu": "PReLU",
}
"""Irregularly spelled names in the schema."""

_TABLES = {
    XnnOperator[name]: table
    for table, names in {
        "Binary": "ADD DIV MINIMUM MULTIPLY SUBTRACT MAXIMUM PRELU BATCH_MATRIX_MULTIPLY",
        "FullyConnected": "FULLY_CONNECTED",
        "Transpose": "STATIC_TRANSPOSE",
        "Convolution": "CONV2D DEPTHWISE_CONV2D CONV_TRANSPOSE_2D",
        "Resize": "STATIC_RESIZE_BILINEAR_2D",
        "Pad": "STATIC_CONSTANT_PAD",
        "Pooling": "AVG_POOLING_2D MAX_POOLING_2D",
        "Reshape": "STATIC_RESHAPE",
        "ArgMax": "ARG_MAX_POOLING_2D",
        "LeakyReLU": "LEAKY_RELU",
        "ELU": "ELU",
        "Concatenate": "CONCATENATE2 CONCATENATE3 CONCATENATE4 CONCATENATE5",
        "Slice": "STATIC_SLICE",
        "Attention": "SCALED_DOT_PRODUCT_ATTENTION",
    }.items()
    for name in names.split()
}
"""The tables of operators; other operators have the table Unary."""
