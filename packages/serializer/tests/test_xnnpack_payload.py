"""Payloads of XNNPACK are read as they are, floating or quantised, or refused with a reason."""

from __future__ import annotations

import pytest

from lowerdeck.serializer import (
    FormatError,
    XnnConstant,
    XnnDatatype,
    XnnEncoding,
    XnnOperator,
    decode_payload,
    encode_payload,
)
from lowerdeck_files.payloads import Flat, convolution, graph, linear, payload, relu, value


def test_a_float_payload_is_read_whole() -> None:
    found = decode_payload(payload(relu()))
    assert (found.version, found.num_externs) == ("0", 2)
    assert (found.input_ids, found.output_ids) == ([0], [1])
    first, second = found.values
    assert (first.id, first.shape, first.flags, first.external_id) == (0, (2, 3), 1, 0)
    assert (second.constant, second.encoding) == (None, XnnEncoding(XnnDatatype.FP32))
    (node,) = found.nodes
    assert (node.operator, node.operator.label) == (XnnOperator.CLAMP, "Clamp")
    assert (node.inputs, node.outputs) == ((0,), (1,))
    assert (node.parameters, node.output_range) == ({"flags": 0}, (0.0, 1.0))


def test_constants_inside_the_payload_have_their_range() -> None:
    data = bytes(range(64))
    found = decode_payload(payload(convolution(), data))
    assert bytes(found.constant_data) == data
    _, _, filters, bias = found.values
    assert filters.constant == XnnConstant(None, 54, 0)
    assert bias.constant == XnnConstant(None, 8, 56)
    assert filters.encoding == XnnEncoding(XnnDatatype.QCINT8, (0.5, 0.25))
    assert found.values[0].encoding == XnnEncoding(XnnDatatype.QINT8, (0.5,), -3)
    (node,) = found.nodes
    assert (node.inputs, node.outputs) == ((0, 2, 3), (1,))
    assert node.parameters["kernel_height"] == 3


def test_constants_in_named_data_and_groups_of_scales_are_read() -> None:
    found = decode_payload(payload(linear()))
    filters = found.values[3]
    assert filters.constant == XnnConstant("weight", 64, 2**64 - 1)
    assert filters.encoding == XnnEncoding(
        XnnDatatype.QBINT4, group_size=32, scale_constant=XnnConstant("scales", 8, 2**64 - 1)
    )
    assert found.values[2].encoding == XnnEncoding(XnnDatatype.QDINT8, nonbatch_dims=1)
    # A bias that is left out is no input.
    assert found.nodes[1].inputs == (2, 3)


def test_what_is_read_is_written_as_it_was() -> None:
    for made, constants in ((relu(), b""), (convolution(), bytes(64)), (linear(), b"")):
        blob = encode_payload(decode_payload(payload(made, constants)))
        assert decode_payload(blob) == decode_payload(payload(made, constants))
        assert encode_payload(decode_payload(blob)) == blob


def test_a_bare_graph_of_either_version_is_read() -> None:
    for identifier in (b"XN00", b"XN01"):
        bare = Flat(identifier).finish(relu())
        found, whole = decode_payload(bare), decode_payload(payload(relu(), b"", identifier))
        assert (found.values, found.nodes) == (whole.values, whole.nodes)


def test_each_operator_keeps_its_number_its_name_and_its_fields() -> None:
    assert [int(one) for one in XnnOperator] == list(range(1, 48))
    assert len({one.label for one in XnnOperator}) == 47
    named = [XnnOperator.PRELU, XnnOperator.STATIC_RESIZE_BILINEAR_2D, XnnOperator.CONV2D]
    assert [one.label for one in named] == ["PReLU", "StaticResizeBilinear2D", "Conv2d"]
    for operator in XnnOperator:
        names = [field.name for field in operator.fields]
        fields = {
            field.name: [1, 2] if field.item else 0.5 if field.kind == "f32" else 7 + number
            for number, field in enumerate(operator.fields)
        }
        table = {"xnode_union_type": int(operator), "xnode_union": (operator.table, fields)}
        (node,) = decode_payload(payload(graph([value(0)], [table]))).nodes
        ids = [fields[name] for name in names if name.endswith("_id")]
        assert set(node.inputs) | set(node.outputs) <= set(ids)
        assert len(node.inputs) == operator.joined or not operator.joined
        assert node.parameters == {
            name: tuple(found) if isinstance(found, list) else found
            for name, found in fields.items()
            if not name.endswith("_id")
        }


_THIRD = ("PerChannelQuant", {"scale_buffer_idx": 3})


@pytest.mark.parametrize(
    ("blob", "reason"),
    [
        (b"", "found 0 bytes"),
        (b"\0\0\0\0XH00", "found 8 bytes, expected at least 30"),
        (payload(relu())[:60], "expected the graph at 32"),
        (payload(relu()).replace(b"XH00", b"XH01"), "found b'XH01', expected b'XH00'"),
        (payload(relu(), b"", b"XN99"), "found b'XN99'"),
        (payload({}), "XNNGraph.xnodes"),
        (payload(graph([], [{}])), "node of kind 0"),
        (payload(graph([], [{"xnode_union_type": 1}])), "node of kind 1"),
        (
            payload(graph([], [{"xnode_union_type": 48, "xnode_union": ("Unary", {})}])),
            "node of kind 48",
        ),
        (payload(graph([{}], [])), "value of kind 0"),
        (payload(graph([value(0, datatype=15)], [])), "unknown datatype 15 of value 0"),
        (payload(graph([value(0, datatype=-1)], [])), "unknown datatype -1"),
        (payload(graph([value(0, constant_buffer_idx=1)], [])), "found constant 1 of 1"),
        (
            payload(graph([value(0, datatype=6, quant=_THIRD)], [])),
            "found constant 3 of 1",
        ),
        (payload(graph([value(0, quant=_THIRD)], [])), "scheme 'channel' .* of FP32, expected ''"),
        (payload(graph([value(0, datatype=3)], [])), "scheme '' .* of QINT8, expected 'tensor'"),
        (payload(graph([], [], [{"named_key": b"\xff"}])), "invalid UTF-8"),
    ],
)
def test_what_is_no_payload_is_refused_with_a_reason(blob: bytes, reason: str) -> None:
    with pytest.raises(FormatError, match=reason):
        decode_payload(blob)
