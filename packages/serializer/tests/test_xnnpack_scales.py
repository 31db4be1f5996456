"""Quantised payloads that the runtime refuses, or computes wrongly without a word."""

from __future__ import annotations

import math
from typing import Any

import pytest

from lowerdeck.serializer import (
    FormatError,
    XnnConstant,
    XnnDatatype,
    XnnGraph,
    XnnNode,
    XnnOperator,
    XnnQuantization,
    XnnValue,
    verify_payload,
)

T = XnnDatatype
DATA = XnnConstant("data", 4096, 0)
NAMED = {"data": 4096}


def tensor(scale: float = 0.5, zero: int = 0) -> XnnQuantization:
    return XnnQuantization("tensor", (scale,), zero)


def channels(count: int = 4, dim: int = 0) -> XnnQuantization:
    return XnnQuantization("channel", (0.5,) * count, channel_dim=dim)


def value(
    number: int, dtype: T = T.FP32, shape: tuple[int, ...] = (2, 4), **more: Any
) -> XnnValue:
    ends: dict[int, Any] = {0: {"flags": 1, "external_id": 0}, 1: {"flags": 2, "external_id": 1}}
    return XnnValue(number, dtype, shape, **{**ends.get(number, {}), **more})


def graph(nodes: list[XnnNode], *values: XnnValue) -> XnnGraph:
    return XnnGraph(
        "0", values, tuple(nodes), (0,), (1,), 2, (XnnConstant(None, 0, 0), DATA), memoryview(b"")
    )


def node(operator: XnnOperator, *inputs: int, output: int = 1, **parameters: Any) -> XnnNode:
    return XnnNode(operator, inputs, (output,), {"flags": 0, **parameters})


def convert(source: XnnQuantization, result: XnnQuantization, **more: Any) -> XnnGraph:
    operator = XnnOperator.LEAKY_RELU if more else XnnOperator.CONVERT
    ends = (value(0, T.QINT8, quantization=source), value(1, T.QINT8, quantization=result))
    return graph([node(operator, 0, **more)], *ends)


def linear(
    filters: T,
    scales: XnnQuantization | None,
    *,
    width: int = 4,
    source: T = T.FP32,
    result: T = T.FP32,
    flags: int = 0,
) -> XnnGraph:
    """Return a layer whose input is quantised at run time."""
    token = XnnQuantization("token", nonbatch_dims=1)
    shape = (width, 4) if flags else (4, width)
    return graph(
        [
            node(XnnOperator.CONVERT, 0, output=2),
            node(XnnOperator.FULLY_CONNECTED, 2, 3, flags=flags),
        ],
        value(0, source, (2, width)),
        value(1, result, (2, 4)),
        value(2, T.QDINT8, (2, width), quantization=token),
        value(3, filters, shape, constant=DATA, quantization=scales),
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
    kind = XnnOperator.CONV_TRANSPOSE_2D if transposed else XnnOperator.CONV2D
    groups = {"group_input_channels": 4, "group_output_channels": 4, "groups": 1}
    token = XnnQuantization("token", nonbatch_dims=dims)
    filters = value(
        3,
        T.QCINT8 if dims else T.FP16,
        (4, 1, 1, 4),
        constant=DATA,
        quantization=channels() if dims else None,
    )
    values = [value(0, shape=(1, 2, 2, 4)), value(1, shape=(1, 2, 2, 4)), filters]
    values.append(value(4, T.FP32 if dims else bias, (4,), constant=DATA))
    layer = node(kind, 2 if dims else 0, 3, 4, flags=flags, **_WINDOW, **groups)
    if not dims:
        return graph([layer], *values)
    values.append(value(2, T.QDINT8, (1, 2, 2, 4), quantization=token))
    return graph([node(XnnOperator.CONVERT, 0, output=2), layer], *values)


def moved(result: XnnQuantization, kind: T = T.QINT8) -> XnnGraph:
    """Return a slice of integers whose result has the scales ``result``."""
    size: dict[str, Any] = {"num_dims": 2, "offsets": (0, 0), "sizes": (2, 4)}
    ends = (value(0, T.QINT8, quantization=tensor()), value(1, kind, quantization=result))
    return graph([node(XnnOperator.STATIC_SLICE, 0, **size)], *ends)


def floats(operator: XnnOperator, source: T, result: T) -> XnnGraph:
    return graph([node(operator, 0)], value(0, source), value(1, result))


RIGHT = {
    "slice of one scale": moved(tensor()),
    "convert of floats": floats(XnnOperator.CONVERT, T.BF16, T.FP32),
    "sine that 1.5 takes": floats(XnnOperator.SIN, T.BF16, T.FP32),
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
    "no scale": (convert(tensor(), channels(2)), "scheme 'tensor'"),
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
    "softmax of two types": (floats(XnnOperator.SOFTMAX, T.FP32, T.FP16), "FP16, FP32 at Softmax"),
    "softmax of bfloat16": (floats(XnnOperator.SOFTMAX, T.BF16, T.BF16), "BF16 at Softmax"),
    "sine of halves": (floats(XnnOperator.SIN, T.FP16, T.FP32), "FP16, FP32 at Sin"),
    "constant at run time": (
        graph(
            [node(XnnOperator.CONVERT, 0)],
            value(0, T.QDINT8, quantization=XnnQuantization("token")),
            value(1),
        ),
        "exists at run time only",
    ),
}


@pytest.mark.parametrize("name", [*RIGHT, *WRONG])
def test_what_the_runtime_refuses_or_computes_wrongly_is_refused(name: str) -> None:
    if name in RIGHT:
        verify_payload(RIGHT[name], NAMED)
        return
    graph, message = WRONG[name]
    with pytest.raises(FormatError, match=message):
        verify_payload(graph, NAMED)
