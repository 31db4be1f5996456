"""Payloads that the runtime refuses, computes wrongly without a word, or ends its process over."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from lowerdeck.serializer import (
    FormatError,
    XnnConstant,
    XnnDatatype,
    XnnEncoding,
    XnnGraph,
    XnnNode,
    XnnOperator,
    XnnValue,
    verify_payload,
)

T = XnnDatatype
Op = XnnOperator
DATA = XnnConstant("data", 1 << 14, 0)
NAMED = {"data": 1 << 14}


Scales = dict[str, Any]


def tensor(scale: float = 0.5, zero: int = 0) -> Scales:
    return {"scales": (scale,), "zero_point": zero}


def channels(count: int = 4, dim: int = 0) -> Scales:
    return {"scales": (0.5,) * count, "channel_dim": dim}


def value(
    number: int,
    dtype: T = T.FP32,
    shape: tuple[int, ...] = (2, 4),
    scales: Scales | None = None,
    **more: Any,
) -> XnnValue:
    ends: dict[int, Any] = {0: {"flags": 1, "external_id": 0}, 1: {"flags": 2, "external_id": 1}}
    encoding = XnnEncoding(dtype, **(scales or {}))
    return XnnValue(number, encoding, shape, **{**ends.get(number, {}), **more})


def graph(nodes: list[XnnNode], *values: XnnValue) -> XnnGraph:
    return XnnGraph("0", list(values), nodes, [0], [1], 2, [XnnConstant(None, 0), DATA])


def node(operator: XnnOperator, *inputs: int, output: int = 1, **parameters: Any) -> XnnNode:
    names = [field.name for field in operator.fields if field.name.endswith("_id")]
    read = [name for name in names if not name.startswith("output")]
    ids = {**dict(zip(read, inputs, strict=False)), "output_id": output}
    return XnnNode(
        operator, {"flags": 0, **dict.fromkeys(names, XnnNode.NONE), **ids, **parameters}
    )


def convert(source: Scales, result: Scales, **more: Any) -> XnnGraph:
    operator = Op.LEAKY_RELU if more else Op.CONVERT
    ends = (value(0, T.QINT8, scales=source), value(1, T.QINT8, scales=result))
    return graph([node(operator, 0, **more)], *ends)


def linear(
    filters: T,
    scales: Scales | None,
    *,
    width: int = 4,
    source: T = T.FP32,
    result: T = T.FP32,
    flags: int = 0,
) -> XnnGraph:
    """Return a layer whose input is quantised at run time."""
    token = {"nonbatch_dims": 1}
    shape = (width, 4) if flags else (4, width)
    return graph(
        [
            node(Op.CONVERT, 0, output=2),
            node(Op.FULLY_CONNECTED, 2, 3, flags=flags),
        ],
        value(0, source, (2, width)),
        value(1, result, (2, 4)),
        value(2, T.QDINT8, (2, width), scales=token),
        value(3, filters, shape, constant=DATA, scales=scales),
    )


_WINDOW = {
    f"{name}_{side}": 1
    for name in ("kernel", "subsampling", "dilation")
    for side in ("height", "width")
}


def convolution(
    bias: T = T.FP16, *, dims: int = 0, flags: int = 0, transposed: bool = False
) -> XnnGraph:
    """Return a convolution of floats by halves, or of an input quantised along ``dims``."""
    kind = Op.CONV_TRANSPOSE_2D if transposed else Op.CONV2D
    groups = {"group_input_channels": 4, "group_output_channels": 4, "groups": 1}
    token = {"nonbatch_dims": dims}
    filters = value(
        3,
        T.QCINT8 if dims else T.FP16,
        (4, 1, 1, 4),
        constant=DATA,
        scales=channels() if dims else None,
    )
    values = [value(0, shape=(1, 2, 2, 4)), value(1, shape=(1, 2, 2, 4)), filters]
    values.append(value(4, T.FP32 if dims else bias, (4,), constant=DATA))
    layer = node(kind, 2 if dims else 0, 3, 4, flags=flags, **_WINDOW, **groups)
    if not dims:
        return graph([layer], *values)
    values.append(value(2, T.QDINT8, (1, 2, 2, 4), scales=token))
    return graph([node(Op.CONVERT, 0, output=2), layer], *values)


def moved(result: Scales, kind: T = T.QINT8) -> XnnGraph:
    """Return a slice of integers whose result has the scales ``result``."""
    size: dict[str, Any] = {"num_dims": 2, "offsets": (0, 0), "sizes": (2, 4)}
    ends = (value(0, T.QINT8, scales=tensor()), value(1, kind, scales=result))
    return graph([node(Op.STATIC_SLICE, 0, **size)], *ends)


def floats(operator: XnnOperator, source: T, result: T) -> XnnGraph:
    return graph([node(operator, 0)], value(0, source), value(1, result))


RIGHT = {
    "slice of one scale": moved(tensor()),
    "convert of floats": floats(Op.CONVERT, T.BF16, T.FP32),
    "sine that 1.5 takes": floats(Op.SIN, T.BF16, T.FP32),
    "convert by 128": convert(tensor(128.0), tensor(1.0)),
    "leaky by 128": convert(tensor(64.0), tensor(1.0), negative_slope=-2.0),
    "even width": linear(T.QCINT4, channels()),
    "odd width of 8 bits": linear(T.QCINT8, channels(), width=5),
    "odd outputs of 4 bits": linear(T.QCINT4, channels(4, 1), width=6, flags=1),
    "halves throughout": linear(T.QCINT8, channels(), source=T.FP16, result=T.FP16),
    "bias of halves": convolution(),
    "flagged bias of floats": convolution(T.FP32, flags=0x80, transposed=True),
    "three dimensions": convolution(dims=3),
}
WRONG = {
    **{
        f"scale {scale}": (convert(tensor(), tensor(scale)), "expected a positive, normal")
        for scale in (0.0, -1.0, math.nan, math.inf, 1e-39)
    },
    "zero point": (convert(tensor(), tensor(1.0, 128)), "zero point 128"),
    "convert by 129": (convert(tensor(129.0), tensor(1.0)), "129 times coarser"),
    "leaky by 129": (convert(tensor(129.0), tensor(1.0), negative_slope=0.5), "129 times"),
    "steep leaky": (convert(tensor(64.0), tensor(1.0), negative_slope=-3.0), "192 times"),
    "filter's zero point": (linear(T.QINT8, tensor(1.0, 3)), "zero point 3 of the filter"),
    "odd width": (linear(T.QCINT4, channels(), width=5), "with 5 inputs, expected an even"),
    "odd transposed": (linear(T.QCINT4, channels(4, 1), width=5, flags=1), "with 5 inputs"),
    "halves become floats": (
        linear(T.QCINT8, channels(), source=T.FP16),
        "makes FP32 of quantised FP16",
    ),
    "one dimension": (convolution(dims=1), "quantised along 1 dimensions"),
    "bias of floats": (convolution(T.FP32), "with a bias of floats"),
    "transposed, bias of floats": (convolution(T.FP32, transposed=True), "with a bias of floats"),
    "slice with another scale": (
        moved(tensor(0.25)),
        "0.25 .zero 0. and 0.5 .zero 0. at StaticSl",
    ),
    "slice with another zero point": (moved(tensor(0.5, 1)), "expected one for all"),
    "slice to another type": (moved(tensor(), T.QUINT8), "QINT8, QUINT8 at StaticSlice"),
    "softmax of two types": (floats(Op.SOFTMAX, T.FP32, T.FP16), "FP16, FP32 at Softmax"),
    "softmax of bfloat16": (floats(Op.SOFTMAX, T.BF16, T.BF16), "BF16 at Softmax"),
    "sine of halves": (floats(Op.SIN, T.FP16, T.FP32), "FP16, FP32 at Sin"),
    "constant at run time": (
        graph(
            [node(Op.CONVERT, 0)],
            value(0, T.QDINT8, scales={}),
            value(1),
        ),
        "exists at run time only",
    ),
}


AXES = ("height", "width")
POOLS = (Op.MAX_POOLING_2D, Op.AVG_POOLING_2D)
WINDOWS = (Op.CONV2D, Op.DEPTHWISE_CONV2D, *POOLS)


def sliding(operator: XnnOperator, **fields: int) -> XnnGraph:
    """Return a graph of one window over an image of 6 by 7."""
    kind, steps = ("pooling", "stride") if operator in POOLS else ("kernel", "subsampling")
    parameters: dict[str, Any] = {
        **dict.fromkeys([f"padding_{side}" for side in ("top", "right", "bottom", "left")], 0),
        **{f"{name}_{axis}": 1 for name in (kind, steps, "dilation") for axis in AXES},
    }
    filters = []
    if operator not in POOLS:
        groups = 4 if operator is Op.DEPTHWISE_CONV2D else 1
        channels = dict.fromkeys(("group_input_channels", "group_output_channels"), 4 // groups)
        parameters |= {"groups": groups, **channels}
        window = (fields.get("kernel_height", 1), fields.get("kernel_width", 1))
        filters = [value(2, shape=(4 // groups, *window, 4), constant=DATA)]
    ends = value(0, shape=(1, 6, 7, 4)), value(1, shape=(1, 1, 1, 4))
    inputs = (0, 2)[: 1 + len(filters)]
    return graph([node(operator, *inputs, **{**parameters, **fields})], *ends, *filters)


def behind(first: XnnNode, between: XnnValue, made: XnnGraph) -> XnnGraph:
    """Return a graph whose only node reads what another node makes of the image."""
    (last,) = made.nodes
    nodes = [first, reading(last, 3)]
    return replace(made, values=[*made.values, between], nodes=nodes)


def reading(last: XnnNode, source: int, **fields: Any) -> XnnNode:
    """Return a node whose first input is another value."""
    name = "input1_id" if "input1_id" in last.fields else "input_id"
    return replace(last, fields={**last.fields, name: source, **fields})


Case = tuple[str, XnnGraph, str | None]


def windows() -> Iterator[Case]:
    reason: str | None
    for operator in WINDOWS:
        kind = "pooling" if operator in POOLS else "kernel"
        for axis, size, padding in (("height", 6, "bottom"), ("width", 7, "left")):
            name, larger = f"{operator.label} {axis}", {f"{kind}_{axis}": size + 1}
            yield f"{name} whole", sliding(operator, **{f"{kind}_{axis}": size}), None
            yield f"{name} padded", sliding(operator, **larger, **{f"padding_{padding}": 1}), None
            reason = f"spans {size + 1} of a {axis} of {size}"
            yield f"{name} larger", sliding(operator, **larger), reason
        if operator is not Op.AVG_POOLING_2D:
            for gap, reason in ((3, None), (4, "spans 9 of a width of 7")):
                fields = {f"{kind}_width": 3, "dilation_width": gap}
                yield f"{operator.label} dilated {gap}", sliding(operator, **fields), reason
    # It pads by itself.
    yield "self-padding", sliding(Op.MAX_POOLING_2D, pooling_width=9, flags=4), None


def between() -> Iterator[Case]:
    reason: str | None
    # The runtime computes sizes in between anew, dies where they are smaller than the window, and
    # takes as much memory as is declared.
    wide = sliding(Op.CONV2D, kernel_width=8)
    for width in (7, 0, 700):
        reason = "at most 168 elements" if width == 700 else "spans 8 of a width of 7"
        for first in (node(Op.ABS, 0, output=3), node(Op.ADD, 0, 0, output=3)):
            made = behind(first, value(3, shape=(1, 6, width, 4)), wide)
            yield f"{first.operator.label} declared {width}", made, reason
    last = replace(sliding(Op.MAX_POOLING_2D), nodes=[node(Op.ABS, 3, output=1)])
    for first in (
        node(Op.STATIC_RESHAPE, 0, output=3, num_dims=2, new_shape=(12, 14)),
        node(Op.STATIC_SLICE, 0, output=3, num_dims=2, offsets=(0, 0), sizes=(1, 1)),
        node(Op.STATIC_TRANSPOSE, 0, output=3, num_dims=4, perm=(0, 2, 1, 3)),
        node(Op.CONCATENATE2, 0, 0, output=3, axis=0),
        node(Op.BATCH_MATRIX_MULTIPLY, 0, 0, output=3),
        node(Op.MULTIPLY, 0, 0, output=3),
    ):
        for width, reason in ((14, None), (14 << 20, r"at most \d+ elements, which")):
            made = behind(first, value(3, shape=(12, width)), last)
            yield f"{first.operator.label} {width}", made, reason
    # Sizes follow through windows and transpositions.
    halved = sliding(Op.MAX_POOLING_2D, pooling_width=2, stride_width=2)
    turned = node(Op.STATIC_TRANSPOSE, 3, output=4, num_dims=4, perm=(0, 2, 1, 3))
    for width, reason in ((6, None), (7, "spans 7 of a width of 6")):
        (pool,) = halved.nodes
        final = reading(pool, 4, pooling_width=width)
        values = [*halved.values, value(3, shape=(1, 6, 3, 4)), value(4, shape=(1, 3, 6, 4))]
        nodes = [reading(pool, 0, output_id=3), turned, final]
        yield f"turned {width}", replace(halved, values=values, nodes=nodes), reason
    # What a reshape gives is not known before, as 0 says; what a pad gives is.
    reshape = node(Op.STATIC_RESHAPE, 0, output=3, num_dims=4, new_shape=(1, 0, 7, 4))
    pads = {"pre_paddings": (0, 1, 0, 0), "post_paddings": (0, 2, 0, 0)}
    pad = node(Op.STATIC_CONSTANT_PAD, 0, output=3, **pads)
    for first, height in ((reshape, 9), (reshape, 1), (pad, 9), (pad, 10)):
        made = behind(
            first, value(3, shape=(1, 0, 7, 4)), sliding(POOLS[0], pooling_height=height)
        )
        reason = "spans 10 of a height of 9" if height == 10 else None
        yield f"{first.operator.label} varies {height}", made, reason


CASES: dict[str, tuple[XnnGraph, str | None]] = {
    **{name: (made, None) for name, made in RIGHT.items()},
    **WRONG,
    **{name: (made, reason) for name, made, reason in (*windows(), *between())},
}


@pytest.mark.parametrize("name", CASES)
def test_what_the_runtime_refuses_or_computes_wrongly_is_refused(name: str) -> None:
    made, reason = CASES[name]
    if reason is None:
        verify_payload(made, NAMED)
        return
    with pytest.raises(FormatError, match=reason):
        verify_payload(made, NAMED)
