"""Windows and sizes between nodes over which the runtime ends its process."""

from __future__ import annotations

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


def value(
    number: int,
    dtype: T = T.FP32,
    shape: tuple[int, ...] = (2, 4),
    **more: Any,
) -> XnnValue:
    ends: dict[int, Any] = {0: {"flags": 1, "external_id": 0}, 1: {"flags": 2, "external_id": 1}}
    encoding = XnnEncoding(dtype)
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
            reason = f"spans {size + 1}, expected at most the padded {axis} {size}"
            yield f"{name} larger", sliding(operator, **larger), reason
        if operator is not Op.AVG_POOLING_2D:
            for gap, reason in ((3, None), (4, "spans 9, expected at most the padded width 7")):
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
        reason = (
            "at most 168 elements"
            if width == 700
            else "spans 8, expected at most the padded width 7"
        )
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
        for width, reason in ((14, None), (14 << 20, r"at most \d+ elements, the output")):
            made = behind(first, value(3, shape=(12, width)), last)
            yield f"{first.operator.label} {width}", made, reason
    # Sizes follow through windows and transpositions.
    halved = sliding(Op.MAX_POOLING_2D, pooling_width=2, stride_width=2)
    turned = node(Op.STATIC_TRANSPOSE, 3, output=4, num_dims=4, perm=(0, 2, 1, 3))
    for width, reason in ((6, None), (7, "spans 7, expected at most the padded width 6")):
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
        reason = "spans 10, expected at most the padded height 9" if height == 10 else None
        yield f"{first.operator.label} varies {height}", made, reason


CASES: dict[str, tuple[XnnGraph, str | None]] = {
    **{name: (made, reason) for name, made, reason in (*windows(), *between())},
}


@pytest.mark.parametrize("name", CASES)
def test_sizes_that_end_the_process_are_refused(name: str) -> None:
    made, reason = CASES[name]
    if reason is None:
        verify_payload(made, NAMED)
        return
    with pytest.raises(FormatError, match=reason):
        verify_payload(made, NAMED)
