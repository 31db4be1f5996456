"""Quantised programs: what is computed on integers, what is refused, and the numbers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from case_making import Case, Function  # type: ignore[import-not-found]
from quantized_cases import (  # type: ignore[import-not-found]
    IN,
    OUT,
    IntegerWeight,
    Step,
    as_runtime,
    by_row,
    by_tensor,
    qd,
    run_time_cases,
    static_cases,
)
from torch import nn
from xnnpack_lowering import delegates, graph_of, lower, named_data, run, whole  # type: ignore[import-not-found]

from lowerdeck.lowered_module import delegation_summary, to_backend
from lowerdeck.serializer import XnnDatatype, XnnGraph, XnnOperator
from lowerdeck.xnnpack import XnnpackError, XnnpackPartitioner

Tensor = torch.Tensor
STATIC = list(static_cases())


def operators(graph: XnnGraph) -> list[XnnOperator]:
    return [node.operator for node in graph.nodes]


@pytest.mark.parametrize("case", STATIC, ids=str)
def test_operators_on_integers_equal_eager_to_a_step(case: Case) -> None:
    partitioner = XnnpackPartitioner()
    delegate = whole(lower(case.model, case.inputs, partitioner))
    assert len(partitioner.in_float) == case.floats, partitioner.in_float
    case.check(run(delegate, case.inputs), case.inputs, 0)


@pytest.mark.parametrize("case", list(run_time_cases()), ids=str)
def test_layers_that_quantise_at_run_time_equal_the_runtimes_formula(case: Case) -> None:
    found = run(whole(lower(case.model, case.inputs)), case.inputs)
    with as_runtime():
        case.check(found, case.inputs)


def test_summaries_say_what_is_computed_in_float_and_why() -> None:
    one = next(one for one in STATIC if one.floats)
    partitioner = XnnpackPartitioner()
    summary = delegation_summary(lower(one.model, one.inputs, partitioner))
    assert [(remark.heading, remark.why) for remark in summary.remarks] == [
        ("computed in float", why) for why in partitioner.in_float.values()
    ]
    assert all(remark.operator.startswith("aten.") for remark in summary.remarks)
    assert "computed in float: aten." in str(summary)


def test_summaries_say_which_weights_no_observer_saw() -> None:
    for scale in (1.0, 0.02):
        weight = IntegerWeight(5, 16, axis=None, scale=scale)
        net = Function(lambda x, w: OUT(F.linear(IN(x), w())), weight)
        partitioner = XnnpackPartitioner()
        summary = delegation_summary(lower(net, (torch.randn(3, 16),), partitioner))
        found = [one for one in summary.remarks if one.heading == "scales without observation"]
        assert len(found) == (scale == 1)
        assert all("call what prepare_pt2e returned" in one.why for one in found)


def test_a_region_between_integers_stays_integers() -> None:
    weight = IntegerWeight(4, 3, 3, 3)

    def net(x: Tensor, w: Any) -> Any:
        y = OUT(torch.relu(F.conv2d(IN(x), w())))
        y = OUT(F.max_pool2d(y, 2) + 0.5)
        y = OUT(torch.cat([y, OUT(torch.sigmoid(y))], 1))
        return OUT(y.mean([2, 3])).flatten(1)

    graph = graph_of(Function(net, weight), torch.randn(1, 3, 10, 10))
    values = {value.id: value for value in graph.values}
    floats = [
        node.operator
        for node in graph.nodes
        if all(values[one].dtype is XnnDatatype.FP32 for one in node.outputs)
    ]
    assert floats == [XnnOperator.CONVERT]
    assert operators(graph).count(XnnOperator.CONVERT) == 2


def test_layers_on_one_input_share_one_conversion() -> None:
    weights = [IntegerWeight(4, 16), IntegerWeight(5, 16, bits=4)]

    def net(x: Tensor, first: Any, second: Any) -> tuple[Tensor, Tensor]:
        return F.linear(by_row(x), first()), F.linear(by_row(x), second())

    graph = graph_of(Function(net, *weights), torch.randn(3, 16))
    assert operators(graph).count(XnnOperator.CONVERT) == 1


def test_a_conversion_far_beyond_the_runtimes_ratio_goes_by_way_of_floats() -> None:
    fine, coarse = Step(0.001), Step(0.2)
    graph = graph_of(Function(lambda x: fine(coarse(x))), torch.randn(3))
    values = {value.id: value.dtype for value in graph.values}
    assert [values[node.outputs[0]] for node in graph.nodes] == [
        *(XnnDatatype.QINT8, XnnDatatype.FP32, XnnDatatype.QINT8, XnnDatatype.FP32)
    ]


def test_what_only_weights_tell_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    heavy = IntegerWeight(5, 16, scale=4.0)
    fine = Step(0.0004)
    with caplog.at_level(logging.INFO, "lowerdeck.xnnpack"):
        graph_of(Function(lambda x, w: fine(F.linear(IN(x), w())), heavy), torch.randn(3, 16))
    (record,) = caplog.records
    assert "linear is computed in float: its sums are 256 or more times coarser" in record.message


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: qd.quantize_per_tensor(x, 0.1, 3, 0, 255, torch.uint8), "uint8"),
        (lambda x: qd.quantize_per_tensor(x, 0.1, 3, -127, 127, torch.int8), "-127 to 127"),
        (lambda x: qd.choose_qparams.tensor(x, -127, 127, 0.1, torch.int8)[0], "-127 to 127"),
        (by_tensor, "quantises rows only inside integer layers"),
    ],
)
def test_what_the_runtime_lacks_is_left_with_a_reason(
    function: Callable[[Tensor], Tensor], reason: str
) -> None:
    partitioner = XnnpackPartitioner()
    lower(Function(function), (torch.ones(2, 4),), partitioner)
    assert any(reason in why for why in partitioner.refused.values())


def test_a_weight_that_an_operator_outside_reads_too_is_left_whole() -> None:
    def tied(ids: Tensor, x: Tensor, w: Any) -> tuple[Tensor, Tensor]:
        weight = w()
        return F.embedding(ids, weight), F.linear(by_row(x), weight)

    partitioner = XnnpackPartitioner()
    inputs = (torch.tensor([1, 2]), torch.randn(2, 16))
    program = torch.export.export(Function(tied, IntegerWeight(10, 16)), inputs)
    lowered = to_backend(program, partitioner)
    assert not delegates(lowered)
    assert "is left to other kernels" in partitioner.refused["linear"]
    for found, wanted in zip(lowered.module()(*inputs), program.module()(*inputs), strict=True):
        torch.testing.assert_close(found, wanted)


def test_integer_weights_keep_their_size() -> None:
    weight = IntegerWeight(64, 128, bits=4)
    for function in (lambda x, w: F.linear(by_row(x), w()), lambda x, w: F.linear(x, w())):
        (delegate,) = delegates(lower(Function(function, weight), (torch.ones(2, 128),)))
        assert sum(map(len, named_data(delegate).values())) == 64 * 64 + 64 * 4


def small_net() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8)),
        *(nn.Hardswish(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(8)),
        *(nn.Linear(8, 5), nn.Softmax(-1)),
    ).eval()


def test_precision_fp16_stores_filters_in_half_the_bytes() -> None:
    x, sizes = torch.randn(2, 3, 9, 9), []
    for precision in (None, "fp16"):
        graph = graph_of(small_net(), x, precision=precision)
        layers = [
            node
            for node in graph.nodes
            if "bias_id" in [field.name for field in node.operator.fields]
        ]
        values = {value.id: value for value in graph.values}
        filters = [values[node.inputs[1]] for node in layers]
        sizes.append(sum(one.constant.size for one in filters if one.constant is not None))
    assert sizes[1] < 0.7 * sizes[0]
    with pytest.raises(XnnpackError, match="found the precision 'int8'"):
        XnnpackPartitioner("int8")
