"""Windows that slide over an image, and must fit into it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lowerdeck.serializer import (
    FormatError,
    XnnConstant,
    XnnDatatype,
    XnnGraph,
    XnnNode,
    XnnOperator,
    XnnValue,
    verify_payload,
)
from lowerdeck.serializer.xnnpack.unset_sizes import unset_result

NAMED = {"data": 1 << 16}


def sliding(operator: XnnOperator, *, flags: int = 0, **fields: int) -> XnnGraph:
    """Return a graph of one window over an image of 6 by 7."""
    pools = operator in POOLS
    kind, steps = ("pooling", "stride") if pools else ("kernel", "subsampling")
    given: dict[str, Any] = dict.fromkeys(
        ("padding_top", "padding_right", "padding_bottom", "padding_left"), 0
    )
    given |= {f"{name}_{axis}": 1 for name in (kind, steps, "dilation") for axis in AXES}
    inputs: tuple[int, ...] = (0,)
    more: tuple[XnnValue, ...] = ()
    if not pools:
        each = operator is XnnOperator.DEPTHWISE_CONV2D
        window = (fields.get("kernel_height", 1), fields.get("kernel_width", 1))
        given |= (
            {"groups": 4, "group_input_channels": 1, "group_output_channels": 1}
            if each
            else {
                "groups": 1,
                "group_input_channels": 4,
                "group_output_channels": 4,
            }
        )
        shape = (1, *window, 4) if each else (4, *window, 4)
        inputs, more = (0, 2), (XnnValue(2, XnnDatatype.FP32, shape, constant=DATA),)
    ends = (
        XnnValue(0, XnnDatatype.FP32, (1, 6, 7, 4), flags=1, external_id=0),
        XnnValue(1, XnnDatatype.FP32, (1, 1, 1, 4), flags=2, external_id=1),
    )
    node = XnnNode(operator, inputs, (1,), {"flags": flags, **given, **fields})
    constants = (XnnConstant(None, 0, 0), DATA)
    return XnnGraph("0", (*ends, *more), (node,), (0,), (1,), 2, constants, memoryview(b""))


AXES = ("height", "width")
DATA = XnnConstant("data", 1 << 14, 0)
CONVOLUTIONS = (XnnOperator.CONV2D, XnnOperator.DEPTHWISE_CONV2D)
POOLS = (XnnOperator.MAX_POOLING_2D, XnnOperator.AVG_POOLING_2D)


@pytest.mark.parametrize("operator", [*CONVOLUTIONS, *POOLS])
@pytest.mark.parametrize(("axis", "size"), [("height", 6), ("width", 7)])
def test_a_window_fits_into_the_image_with_its_padding(
    operator: XnnOperator, axis: str, size: int
) -> None:
    kind = "pooling" if operator in POOLS else "kernel"
    padding = {"height": "padding_bottom", "width": "padding_left"}[axis]
    whole = {f"{kind}_{axis}": size}
    larger = {f"{kind}_{axis}": size + 1}
    verify_payload(sliding(operator, **whole), NAMED)
    verify_payload(sliding(operator, **larger, **{padding: 1}), NAMED)
    with pytest.raises(FormatError, match=f"spans {size + 1} of a {axis} of {size}"):
        verify_payload(sliding(operator, **larger), NAMED)


@pytest.mark.parametrize("operator", [*CONVOLUTIONS, POOLS[0]])
def test_a_window_with_gaps_spans_them_too(operator: XnnOperator) -> None:
    kind = "pooling" if operator in POOLS else "kernel"
    fields = {f"{kind}_width": 3, "dilation_width": 3}
    verify_payload(sliding(operator, **fields), NAMED)
    with pytest.raises(FormatError, match="spans 9 of a width of 7"):
        verify_payload(sliding(operator, **{**fields, "dilation_width": 4}), NAMED)


def test_an_operator_that_pads_by_itself_fits_always() -> None:
    verify_payload(sliding(XnnOperator.MAX_POOLING_2D, pooling_width=9, flags=4), NAMED)


@pytest.mark.parametrize(
    ("width", "message"),
    [
        (7, "spans 8 of a width of 7"),
        (0, "spans 8 of a width of 7"),
        (700, "at most 168 elements"),
    ],
)
def test_what_a_payload_says_of_sizes_in_between_is_believed_in_nothing(
    width: int, message: str
) -> None:
    """The runtime computes them anew, and dies where they are smaller than the window.

    For what is declared to be larger it takes as much memory.
    """
    image = sliding(XnnOperator.CONV2D, kernel_width=8)
    lying = XnnValue(3, XnnDatatype.FP32, (1, 6, width, 4))
    (conv,) = image.nodes
    for kind, inputs in ((XnnOperator.ABS, (0,)), (XnnOperator.ADD, (0, 0))):
        first = XnnNode(kind, inputs, (3,), {"flags": 0})
        second = replace(conv, inputs=(3, *conv.inputs[1:]))
        graph = replace(image, values=(*image.values, lying), nodes=(first, second))
        with pytest.raises(FormatError, match=message):
            verify_payload(graph, NAMED)


@pytest.mark.parametrize(
    ("operator", "fields"),
    [
        (XnnOperator.STATIC_RESHAPE, {"num_dims": 2, "new_shape": (12, 14)}),
        (XnnOperator.STATIC_SLICE, {"num_dims": 2, "offsets": (0, 0), "sizes": (1, 1)}),
        (XnnOperator.STATIC_TRANSPOSE, {"num_dims": 4, "perm": (0, 2, 1, 3)}),
        (XnnOperator.CONCATENATE2, {"axis": 0}),
        (XnnOperator.BATCH_MATRIX_MULTIPLY, {}),
        (XnnOperator.MULTIPLY, {}),
    ],
)
def test_a_value_declares_no_more_than_its_node_gives(
    operator: XnnOperator, fields: dict[str, Any]
) -> None:
    image = sliding(XnnOperator.MAX_POOLING_2D)
    twice = operator.table in ("Binary", "Concatenate")
    first = XnnNode(operator, (0, 0) if twice else (0,), (3,), {"flags": 0, **fields})
    last = XnnNode(XnnOperator.ABS, (3,), (1,), {"flags": 0})
    for sizes, right in (((12, 14), True), ((12, 14 << 20), False)):
        between = XnnValue(3, XnnDatatype.FP32, sizes)
        graph = replace(image, values=(*image.values, between), nodes=(first, last))
        if right:
            verify_payload(graph, NAMED)
        else:
            with pytest.raises(FormatError, match=r"at most \d+ elements, which"):
                verify_payload(graph, NAMED)


def test_sizes_follow_through_windows_and_transpositions() -> None:
    image = sliding(XnnOperator.MAX_POOLING_2D, pooling_width=2, stride_width=2)
    (pool,) = image.nodes
    turned = XnnNode(
        XnnOperator.STATIC_TRANSPOSE, (3,), (4,), {"flags": 0, "num_dims": 4, "perm": (0, 2, 1, 3)}
    )
    values = (
        *image.values,
        XnnValue(3, XnnDatatype.FP32, (1, 6, 3, 4)),
        XnnValue(4, XnnDatatype.FP32, (1, 3, 6, 4)),
    )
    for width, fits in ((6, True), (7, False)):
        last = replace(pool, inputs=(4,), parameters={**pool.parameters, "pooling_width": width})
        nodes = (replace(pool, outputs=(3,)), turned, last)
        graph = replace(image, values=values, nodes=nodes)
        if fits:
            verify_payload(graph, NAMED)
        else:
            with pytest.raises(FormatError, match="spans 7 of a width of 6"):
                verify_payload(graph, NAMED)


@pytest.mark.parametrize(
    ("maker", "fields", "height", "fits"),
    [
        # What a reshape gives is not known before: 0 says that it varies.
        (XnnOperator.STATIC_RESHAPE, {"num_dims": 4, "new_shape": (1, 0, 7, 4)}, 9, True),
        (XnnOperator.STATIC_RESHAPE, {"num_dims": 4, "new_shape": (1, 0, 7, 4)}, 1, True),
        # What a pad gives is.
        *(
            (
                XnnOperator.STATIC_CONSTANT_PAD,
                {"pre_paddings": (0, 1, 0, 0), "post_paddings": (0, 2, 0, 0)},
                height,
                height <= 9,
            )
            for height in (9, 10)
        ),
    ],
)
def test_a_size_in_between_that_varies_is_no_size(
    maker: XnnOperator, fields: dict[str, Any], height: int, fits: bool
) -> None:
    graph = sliding(XnnOperator.MAX_POOLING_2D, pooling_height=height)
    (node,) = graph.nodes
    between = XnnValue(3, XnnDatatype.FP32, (1, 0, 7, 4))
    first = XnnNode(maker, (0,), (3,), {"flags": 0, **fields})
    window = replace(node, inputs=(3,))
    graph = replace(graph, values=(*graph.values, between), nodes=(first, window))
    if fits:
        verify_payload(graph, NAMED)
        return
    with pytest.raises(FormatError, match="spans 10 of a height of 9"):
        verify_payload(graph, NAMED)


@pytest.mark.parametrize(
    ("shape", "after", "unset"),
    [
        ((0, 0, 7, 4), XnnOperator.ABS, True),
        ((0, 6, 0, 4), XnnOperator.ABS, True),
        # A reshape may tell one size that varies, and does so in files of ours.
        ((0, 6, 7, 4), XnnOperator.ABS, False),
        ((1, 0, 0, 4), XnnOperator.ABS, False),
        ((0, 0, 7, 4), XnnOperator.STATIC_RESHAPE, False),
        ((0, 0, 7, 4), XnnOperator.GLOBAL_AVG_POOLING_2D, False),
    ],
)
def test_no_images_of_a_size_that_varies_leave_results_unset(
    shape: tuple[int, ...], after: XnnOperator, unset: bool
) -> None:
    graph = sliding(XnnOperator.MAX_POOLING_2D)
    (pool,) = graph.nodes
    between = XnnValue(3, XnnDatatype.FP32, shape)
    last = XnnNode(after, (3,), (1,), {"flags": 0})
    outside = replace(graph.values[1], shape=shape)
    values = (graph.values[0], outside, between)
    graph = replace(graph, values=values, nodes=(replace(pool, outputs=(3,)), last))
    assert (unset_result(graph) == 1) == unset
