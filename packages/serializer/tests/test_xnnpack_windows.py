"""Windows over an image must fit into it; sizes in between are computed, not believed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from lowerdeck import serializer as pte
from lowerdeck.serializer.xnnpack.unset_sizes import unset_result

O = pte.XnnOperator  # noqa: E741
NAMED = {"data": 1 << 16}
AXES = ("height", "width")
DATA = pte.XnnConstant("data", 1 << 14, 0)
POOLS = (O.MAX_POOLING_2D, O.AVG_POOLING_2D)
WINDOWS = (O.CONV2D, O.DEPTHWISE_CONV2D, *POOLS)


def value(number: int, *shape: int, **more: Any) -> pte.XnnValue:
    return pte.XnnValue(number, pte.XnnDatatype.FP32, shape, **more)


def node(
    operator: pte.XnnOperator, inputs: tuple[int, ...], output: int, **more: Any
) -> pte.XnnNode:
    return pte.XnnNode(operator, inputs, (output,), {"flags": 0, **more})


def sliding(operator: pte.XnnOperator, **fields: int) -> pte.XnnGraph:
    """Return a graph of one window over an image of 6 by 7."""
    kind, steps = ("pooling", "stride") if operator in POOLS else ("kernel", "subsampling")
    parameters: dict[str, Any] = {
        **dict.fromkeys([f"padding_{side}" for side in ("top", "right", "bottom", "left")], 0),
        **{f"{name}_{axis}": 1 for name in (kind, steps, "dilation") for axis in AXES},
    }
    filters = []
    if operator not in POOLS:
        groups = 4 if operator is O.DEPTHWISE_CONV2D else 1
        channels = dict.fromkeys(("group_input_channels", "group_output_channels"), 4 // groups)
        parameters |= {"groups": groups, **channels}
        window = (fields.get("kernel_height", 1), fields.get("kernel_width", 1))
        filters = [value(2, 4 // groups, *window, 4, constant=DATA)]
    ends = (
        value(0, 1, 6, 7, 4, flags=1, external_id=0),
        value(1, 1, 1, 1, 4, flags=2, external_id=1),
    )
    inputs = (0, 2)[: 1 + len(filters)]
    slide = node(operator, inputs, 1, **{**parameters, **fields})
    constants = (pte.XnnConstant(None, 0, 0), DATA)
    return pte.XnnGraph(
        "0", (*ends, *filters), (slide,), (0,), (1,), 2, constants, memoryview(b"")
    )


def behind(first: pte.XnnNode, between: pte.XnnValue, graph: pte.XnnGraph) -> pte.XnnGraph:
    """Return a graph whose only node reads what another node makes of the image."""
    (last,) = graph.nodes
    nodes = (first, replace(last, inputs=(3, *last.inputs[1:])))
    return replace(graph, values=(*graph.values, between), nodes=nodes)


Case = tuple[str, pte.XnnGraph, str | None]


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
        if operator is not O.AVG_POOLING_2D:
            for gap, reason in ((3, None), (4, "spans 9 of a width of 7")):
                fields = {f"{kind}_width": 3, "dilation_width": gap}
                yield f"{operator.label} dilated {gap}", sliding(operator, **fields), reason
    # It pads by itself.
    yield "self-padding", sliding(O.MAX_POOLING_2D, pooling_width=9, flags=4), None


def between() -> Iterator[Case]:
    reason: str | None
    # The runtime computes sizes in between anew, dies where they are smaller than the window, and
    # takes as much memory as is declared.
    wide = sliding(O.CONV2D, kernel_width=8)
    for width in (7, 0, 700):
        reason = "at most 168 elements" if width == 700 else "spans 8 of a width of 7"
        for first in (node(O.ABS, (0,), 3), node(O.ADD, (0, 0), 3)):
            graph = behind(first, value(3, 1, 6, width, 4), wide)
            yield f"{first.operator.label} declared {width}", graph, reason
    last = replace(sliding(O.MAX_POOLING_2D), nodes=(node(O.ABS, (3,), 1),))
    for first in (
        node(O.STATIC_RESHAPE, (0,), 3, num_dims=2, new_shape=(12, 14)),
        node(O.STATIC_SLICE, (0,), 3, num_dims=2, offsets=(0, 0), sizes=(1, 1)),
        node(O.STATIC_TRANSPOSE, (0,), 3, num_dims=4, perm=(0, 2, 1, 3)),
        node(O.CONCATENATE2, (0, 0), 3, axis=0),
        node(O.BATCH_MATRIX_MULTIPLY, (0, 0), 3),
        node(O.MULTIPLY, (0, 0), 3),
    ):
        for width, reason in ((14, None), (14 << 20, r"at most \d+ elements, which")):
            graph = behind(first, value(3, 12, width), last)
            yield f"{first.operator.label} {width}", graph, reason
    # Sizes follow through windows and transpositions.
    halved = sliding(O.MAX_POOLING_2D, pooling_width=2, stride_width=2)
    turned = node(O.STATIC_TRANSPOSE, (3,), 4, num_dims=4, perm=(0, 2, 1, 3))
    for width, reason in ((6, None), (7, "spans 7 of a width of 6")):
        (pool,) = halved.nodes
        final = replace(pool, inputs=(4,), parameters={**pool.parameters, "pooling_width": width})
        values = (*halved.values, value(3, 1, 6, 3, 4), value(4, 1, 3, 6, 4))
        nodes = (replace(pool, outputs=(3,)), turned, final)
        yield f"turned {width}", replace(halved, values=values, nodes=nodes), reason
    # What a reshape gives is not known before, as 0 says; what a pad gives is.
    reshape = node(O.STATIC_RESHAPE, (0,), 3, num_dims=4, new_shape=(1, 0, 7, 4))
    pads = {"pre_paddings": (0, 1, 0, 0), "post_paddings": (0, 2, 0, 0)}
    pad = node(O.STATIC_CONSTANT_PAD, (0,), 3, **pads)
    for first, height in ((reshape, 9), (reshape, 1), (pad, 9), (pad, 10)):
        graph = behind(first, value(3, 1, 0, 7, 4), sliding(POOLS[0], pooling_height=height))
        reason = "spans 10 of a height of 9" if height == 10 else None
        yield f"{first.operator.label} varies {height}", graph, reason


CASES = {name: (graph, reason) for name, graph, reason in (*windows(), *between())}


@pytest.mark.parametrize("name", CASES)
def test_a_window_fits_into_what_it_slides_over(name: str) -> None:
    graph, reason = CASES[name]
    if reason is None:
        pte.verify_payload(graph, NAMED)
        return
    with pytest.raises(pte.FormatError, match=reason):
        pte.verify_payload(graph, NAMED)


@pytest.mark.parametrize(
    ("shape", "after", "unset"),
    [
        ((0, 0, 7, 4), O.ABS, True),
        ((0, 6, 0, 4), O.ABS, True),
        # A reshape may tell one size that varies, and does so in files of ours.
        ((0, 6, 7, 4), O.ABS, False),
        ((1, 0, 0, 4), O.ABS, False),
        ((0, 0, 7, 4), O.STATIC_RESHAPE, False),
        ((0, 0, 7, 4), O.GLOBAL_AVG_POOLING_2D, False),
    ],
)
def test_no_images_of_a_size_that_varies_leave_results_unset(
    shape: tuple[int, ...], after: pte.XnnOperator, unset: bool
) -> None:
    graph = sliding(O.MAX_POOLING_2D)
    (pool,) = graph.nodes
    values = (graph.values[0], replace(graph.values[1], shape=shape), value(3, *shape))
    nodes = (replace(pool, outputs=(3,)), node(after, (3,), 1))
    assert (unset_result(replace(graph, values=values, nodes=nodes)) == 1) == unset
