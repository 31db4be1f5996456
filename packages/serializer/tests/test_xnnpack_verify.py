"""Each rule that a payload of XNNPACK must keep, broken once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from lowerdeck.serializer import (
    FormatError,
    Hazard,
    Int,
    ScalarType,
    XnnDatatype,
    XnnOperator,
    decode_payload,
    serialize_pte,
    verify_payload,
    verify_pte,
)
from lowerdeck_files.payloads import (
    NONE,
    Table,
    convolution,
    graph,
    linear,
    node,
    payload,
    program,
    relu,
    value,
)

NAMED = {"weight": 64, "scales": 8}


def check(root: Table, inside: int = 64) -> None:
    verify_payload(decode_payload(payload(root, bytes(inside))), NAMED)


def changed(root: Table, number: int, part: str = "tensor_value", **fields: Any) -> Table:
    """Return a graph with fields of one value, or of its scales, changed."""
    _, table = root["xvalues"][number]["xvalue_union"]
    part_of = table.get(part, table)
    (part_of[1] if part == "quant_params" else part_of).update(fields)
    return root


def rescaled(root: Table, number: int, **fields: Any) -> Table:
    return changed(root, number, "quant_params", **fields)


def renode(root: Table, number: int = 0, **fields: Any) -> Table:
    root["xnodes"][number]["xnode_union"][1].update(fields)
    return root


def chain(*nodes: Table, values: Sequence[Table] = ()) -> Table:
    """Return a graph of an input 0, an output 1, more values and some nodes."""
    ends = [value(0, external_id=0, flags=1), value(1, external_id=1, flags=2)]
    return graph([*ends, *values], nodes, [{"size": 24}])


def unary(read: int, made: int) -> Table:
    return node(XnnOperator.ABS, input_id=read, output_id=made)


def listed(operator: XnnOperator, **fields: Any) -> Table:
    return chain(node(operator, input_id=0, output_id=1, **fields))


def weights(filters: Table, flags: int = 0) -> Table:
    """Return a graph of a linear layer of floats by a filter without a bias."""
    ids = {"input1_id": 0, "filter_id": 2, "bias_id": NONE, "output_id": 1}
    layer = node(XnnOperator.FULLY_CONNECTED, flags=flags, **ids)
    return chain(layer, values=[filters])


def four_bits(flags: int) -> Table:
    quant = ("PerChannelQuant", {"scale": [1.0] * 4, "channel_dim": flags})
    kind = int(XnnDatatype.QCINT4)
    return weights(value(2, (4, 4), datatype=kind, constant_buffer_idx=1, quant=quant), flags)


def depthwise() -> Table:
    root = convolution()
    root["xnodes"][0]["xnode_union_type"] = int(XnnOperator.DEPTHWISE_CONV2D)
    return root


def constant(number: int) -> Table:
    return value(number, constant_buffer_idx=1)


RIGHT: dict[str, Callable[[], Table]] = {
    "relu": relu,
    "convolution": convolution,
    "linear": linear,
    "a chain in any order": lambda: chain(unary(2, 1), unary(0, 2), values=[value(2)]),
    "a constant operand": lambda: chain(
        node(XnnOperator.ADD, input1_id=0, input2_id=2, output_id=1), values=[constant(2)]
    ),
    "4 bits": lambda: four_bits(0),
    "a pool without dilations": lambda: listed(
        XnnOperator.AVG_POOLING_2D,
        **{f"{name}_{side}": 2 for name in ("pooling", "stride") for side in ("height", "width")},
    ),
    "concatenation leaves out what it does not join": lambda: chain(
        node(XnnOperator.CONCATENATE2, input1_id=0, input2_id=0, input3_id=77, output_id=1)
    ),
    "a transposition": lambda: listed(XnnOperator.STATIC_TRANSPOSE, num_dims=2, perm=[1, 0]),
}

BROKEN: dict[str, tuple[Callable[[], Table], str]] = {
    "arguments": (lambda: relu() | {"num_externs": 4097}, "4097 arguments"),
    "one id": (lambda: changed(relu(), 1, id_out=0), "two XNNPACK values with the id 0"),
    "one argument": (lambda: changed(relu(), 1, external_id=0), "two XNNPACK values for arg"),
    "rank": (lambda: changed(relu(), 0, dims=[1] * 7), "7 dimensions"),
    "flags": (lambda: changed(relu(), 0, flags=3), "the flags 3"),
    "unflagged argument": (lambda: changed(relu(), 0, flags=0), "flags and external id disagree"),
    "flagged internal": (lambda: changed(relu(), 0, external_id=NONE), "external id disagree"),
    "argument beyond": (lambda: changed(relu(), 0, external_id=2), "argument 2 of 2"),
    "elements": (lambda: changed(relu(), 0, dims=[1 << 16, 1 << 15]), "below 2\\*\\*31 elements"),
    "size": (lambda: changed(relu(), 0, dims=[0, 1 << 31]), "below 2\\*\\*31 elements"),
    "constant beyond": (
        lambda: changed(convolution(), 2, dims=[3, 3, 3, 3]),
        "64 bytes of constant data.*value 2 at offset 0",
    ),
    "entry beyond": (lambda: changed(linear(), 3, dims=[5, 32]), "64 bytes of named data"),
    "channel": (lambda: rescaled(convolution(), 2, channel_dim=4), "channel dimension 4"),
    "negative channel": (lambda: rescaled(convolution(), 2, channel_dim=-1), "dimension -1"),
    "few scales": (lambda: rescaled(convolution(), 2, scale=[1.0]), "found 1 scales"),
    "no group": (lambda: rescaled(linear(), 3, group_size=0), "group size 0"),
    "few groups": (
        lambda: rescaled(linear(), 3, group_size=16),
        "8 bytes of named data for the s",
    ),
    "no input": (lambda: renode(relu(), input_id=9), "value 9 as input of Clamp"),
    "no output": (lambda: renode(relu(), output_id=9), "value 9 as output of Clamp"),
    "a bias that is none": (lambda: renode(linear(), 1, bias_id=9), "value 9 as input of Fully"),
    "a filter that is none": (lambda: renode(linear(), 1, filter_id=NONE), "as input of Fully"),
    "no stride": (lambda: renode(convolution(), subsampling_width=0), "0 as subsampling_width"),
    "no group of channels": (lambda: renode(convolution(), groups=0), "0 as groups"),
    "no dilation": (lambda: renode(convolution(), dilation_height=0), "0 as dilation_height"),
    "huge padding": (lambda: renode(convolution(), padding_top=1 << 25), "as padding_top"),
    "no window": (lambda: listed(XnnOperator.MAX_POOLING_2D), "0 as pooling_height"),
    "short list": (
        lambda: listed(XnnOperator.STATIC_CONSTANT_PAD, pre_paddings=[1], post_paddings=[1, 1]),
        "1 pre_paddings of StaticConstantPad, expected 2",
    ),
    "long list": (
        lambda: listed(XnnOperator.STATIC_RESHAPE, num_dims=7, new_shape=[1] * 7),
        "at most 6",
    ),
    "huge item": (
        lambda: listed(XnnOperator.STATIC_SLICE, num_dims=1, offsets=[1 << 25], sizes=[1]),
        "in offsets of StaticSlice",
    ),
    "no permutation": (
        lambda: listed(XnnOperator.STATIC_TRANSPOSE, num_dims=2, perm=[1, 1]),
        "the order \\(1, 1\\)",
    ),
    "filter's sizes": (lambda: renode(convolution(), kernel_width=2), "a filter \\(2, 3, 3, 3\\)"),
    "depthwise filter": (depthwise, "expected \\(1, 3, 3, 2\\)"),
    "one constant": (
        lambda: changed(convolution(), 3, constant_buffer_idx=0),
        "exactly one of filter and bias is constant",
    ),
    "short bias": (lambda: changed(convolution(), 3, dims=[1]), "a bias \\(1,\\)"),
    "empty filter": (lambda: weights(value(2, (4, 0), constant_buffer_idx=1)), "without elements"),
    "transposed 4 bits": (lambda: four_bits(1), "transposed 4-bit filter"),
    "filter and operand": (
        lambda: chain(
            *weights(constant(2))["xnodes"], unary(2, 3), values=[constant(2), value(3)]
        ),
        "the constant 2 as a filter or bias, and as an input of Abs",
    ),
    "two makers": (
        lambda: chain(unary(0, 1), unary(0, 1)),
        "1 as a result of Abs, but it is a constant, an input or",
    ),
    "made input": (lambda: chain(unary(0, 1), unary(1, 0)), "0 as a result of Abs"),
    "made constant": (
        lambda: chain(unary(0, 1), unary(0, 2), values=[constant(2)]),
        "2 as a result of Abs",
    ),
    "no maker of an output": (chain, "the output 1, which no node produces"),
    "no maker of an operand": (
        lambda: chain(unary(2, 1), values=[value(2)]),
        "value 2 as input of Abs, but no node produces it",
    ),
    "its own maker": (lambda: chain(unary(1, 1)), "dependency cycle"),
    "a ring": (
        lambda: chain(unary(2, 3), unary(3, 2), unary(0, 1), values=[value(2), value(3)]),
        "dependency cycle",
    ),
}


@pytest.mark.parametrize("name", [*RIGHT, *BROKEN])
def test_a_broken_rule_is_refused_with_what_was_found(name: str) -> None:
    if name in RIGHT:
        check(RIGHT[name]())
        return
    make, reason = BROKEN[name]
    with pytest.raises(FormatError, match=reason):
        check(make())


def test_named_data_of_another_file_are_not_missed() -> None:
    verify_payload(decode_payload(payload(linear())), {})


F, T = ScalarType, XnnDatatype
FLOATS = (F.FLOAT, F.FLOAT)


@pytest.mark.parametrize(
    ("kinds", "sizes", "datatype", "reason"),
    [
        (FLOATS, (2, 3), T.FP32, None),
        ((*FLOATS, F.INT), (2, 3), T.FP32, None),
        ((F.HALF, F.HALF), (2, 3), T.FP16, None),
        ((F.BFLOAT16, F.BFLOAT16), (2, 3), T.BF16, None),
        ((F.INT, F.INT), (2, 3), T.INT32, None),
        ((F.LONG, F.LONG), (2, 3), T.INT32, None),
        (FLOATS[:1], (2, 3), T.FP32, "found 1 arguments of an XNNPACK delegate, expected 2"),
        (FLOATS[:0], (2, 3), T.FP32, "found 0 arguments of an XNNPACK delegate, expected 2"),
        ((F.LONG, F.FLOAT), (2, 3), T.FP32, "found LONG as argument 0"),
        ((F.FLOAT, F.HALF), (2, 3), T.FP32, "found HALF as argument 1"),
        (FLOATS, (1,) * 7, T.FP32, "found 7 dimensions in argument 0"),
    ],
)
def test_a_call_must_fit_its_payload(
    kinds: Sequence[ScalarType], sizes: Sequence[int], datatype: XnnDatatype, reason: str | None
) -> None:
    root = changed(changed(relu(), 0, datatype=int(datatype)), 1, datatype=int(datatype))
    made = program(payload(root), kinds, sizes)
    if not kinds:
        made.execution_plan[0].inputs = made.execution_plan[0].outputs = []
    if reason is None:
        verify_pte(serialize_pte(made))
        return
    with pytest.raises(FormatError, match=reason):
        verify_pte(serialize_pte(made))


def test_a_file_is_refused_where_its_payload_or_its_call_is() -> None:
    broken = program(payload(renode(relu(), input_id=9)))
    with pytest.raises(FormatError, match=r"method 'forward'.delegates\[0\].* value 9 as input"):
        verify_pte(serialize_pte(broken))
    made = program(payload(relu()))
    made.execution_plan[0].values[0].val = Int(3)
    with pytest.raises(FormatError, match="found a Int as argument 0, expected a Tensor"):
        verify_pte(serialize_pte(made))


@pytest.mark.parametrize(
    ("reads", "warned"), [((0, 2, 3), True), ((0, 0, 2), True), ((0, 2, 2), True), ((0, 4), False)]
)
def test_moves_that_the_runtime_merges_are_warned_of(reads: Sequence[int], warned: bool) -> None:
    """Each transpose reads one value and makes the next; value 4 is a sigmoid of value 2."""
    made = [2, 3, 1][: len(reads)]
    nodes = [
        node(
            XnnOperator.STATIC_TRANSPOSE, num_dims=2, perm=[1, 0], input_id=read, output_id=output
        )
        for read, output in zip(reads, made, strict=True)
    ]
    if len(reads) == 2:
        nodes.insert(1, node(XnnOperator.SIGMOID, input_id=2, output_id=4))
        nodes.append(node(XnnOperator.SIGMOID, input_id=3, output_id=1))
    root = chain(*nodes, values=[value(number) for number in (2, 3, 4)])
    hazards: list[Hazard] = []
    file = serialize_pte(program(payload(root)))
    verify_pte(file, on_hazard=hazards.append)
    assert ["two StaticTranspose nodes" in str(one) for one in hazards] == [True] * warned
