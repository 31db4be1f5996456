"""Quantised programs: what is computed on integers, what is refused, and the numbers."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from quantized_cases import (  # type: ignore[import-not-found]
    IN,
    OUT,
    IntegerWeight,
    QuantizedCase,
    Step,
    by_row,
    by_tensor,
    expected,
    qd,
    run_time_cases,
    static_cases,
)
from torch import nn
from xnnpack_cases import Function  # type: ignore[import-not-found]
from xnnpack_lowering import delegates, lower, named_data  # type: ignore[import-not-found]

from lowerdeck.lowered_module import (
    LoweredBackendModule,
    PreprocessError,
    delegation_summary,
    to_backend,
)
from lowerdeck.serializer import XnnDatatype, XnnGraph, XnnOperator, decode_payload
from lowerdeck.torch_base import arguments_of
from lowerdeck.xnnpack import (
    QuantizationError,
    XnnpackError,
    XnnpackPartitioner,
    XnnpackRuntime,
)

Tensor = torch.Tensor
RUNTIME = XnnpackRuntime()
STATIC = list(static_cases())
RUN_TIME = list(run_time_cases())


def run(delegate: LoweredBackendModule, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Return what our runtime half computes."""
    blob = memoryview(delegate.processed_bytes)
    return RUNTIME.execute(RUNTIME.init(blob, [], named_data(delegate)), inputs)


def taken_whole(one: QuantizedCase, partitioner: XnnpackPartitioner) -> LoweredBackendModule:
    """Return the one delegate that a case becomes, outside of which nothing computes."""
    program = lower(one.model, one.inputs, partitioner)
    calls = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert [call for call in calls if "getitem" not in call] == ["executorch_call_delegate"]
    delegate: LoweredBackendModule
    (delegate,) = delegates(program)
    return delegate


def graph_of(module: nn.Module, *inputs: Tensor, **options: Any) -> XnnGraph:
    """Return the payload of the one delegate of a model."""
    (delegate,) = delegates(lower(module, inputs, XnnpackPartitioner(**options)))
    return decode_payload(delegate.processed_bytes)


def operators(graph: XnnGraph) -> list[XnnOperator]:
    return [node.operator for node in graph.nodes]


@pytest.mark.parametrize("one", STATIC, ids=lambda one: one.name)
def test_operators_on_integers_equal_eager_to_a_step(one: QuantizedCase) -> None:
    partitioner = XnnpackPartitioner()
    delegate = taken_whole(one, partitioner)
    assert len(partitioner.in_float) == one.floats, partitioner.in_float
    for found, wanted in zip(run(delegate, one.inputs), expected(one), strict=True):
        assert found.dtype == wanted.dtype
        assert float((found.float() - wanted.float()).abs().max()) <= one.step


@pytest.mark.parametrize("one", RUN_TIME, ids=lambda one: one.name)
def test_layers_that_quantise_at_run_time_equal_the_runtimes_formula(one: QuantizedCase) -> None:
    delegate = taken_whole(one, XnnpackPartitioner())
    (found,), (wanted,) = run(delegate, one.inputs), expected(one)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=one.step)


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
        found = [one for one in summary.remarks if one.heading == "quantised without a look"]
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


@pytest.mark.filterwarnings("ignore")  # torchao raises dozens against itself
@pytest.mark.parametrize("rule", ["SYMMETRIC", "ASYMMETRIC"])
def test_torchaos_layers_of_bytes_are_layers(rule: str) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 20), nn.ReLU(), nn.Linear(20, 5, bias=False)).eval()
    config = torchao.Int8DynamicActivationInt8WeightConfig(
        act_mapping_type=torchao.MappingType[rule], set_inductor_config=False
    )
    torchao.quantize_(model, config)
    inputs = (torch.randn(2, 3, 33),)
    (delegate,) = delegates(lower(model, inputs, XnnpackPartitioner()))
    graph = decode_payload(delegate.processed_bytes)
    assert operators(graph).count(XnnOperator.FULLY_CONNECTED) == 2
    (found,) = run(delegate, inputs)
    # The runtime's own rule is the asymmetric one; the other's steps are up to twice as wide.
    most = 0.02 if rule == "SYMMETRIC" else 1e-5
    assert (found - model(*inputs)).abs().max() <= most


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


BAD_SCALES = [0.0, -0.5, math.nan, math.inf, 1e-39, 1e39]


@pytest.mark.parametrize("scale", BAD_SCALES)
def test_a_scale_that_is_none_is_one_error_with_the_node(scale: float) -> None:
    step = Step(scale)
    program = torch.export.export(Function(step.quantize), (torch.ones(2),))
    with pytest.raises(QuantizationError, match=r"found the scale .*quantize_per_tensor"):
        XnnpackPartitioner().partition(program)


@pytest.mark.parametrize("scale", BAD_SCALES[:-1])
def test_a_scale_of_a_channel_that_is_none_is_one_error_with_the_node(scale: float) -> None:
    weight = IntegerWeight(4, 8)
    weight.scales[2] = scale
    with pytest.raises(PreprocessError, match=r"found the scale .*dequantize_per_channel"):
        lower(
            Function(lambda x, w: F.linear(x, w()), weight),
            (torch.ones(2, 8),),
            XnnpackPartitioner(),
        )


def test_two_scales_of_one_tensor_are_one_error_with_the_node() -> None:
    def net(x: Tensor) -> Any:
        stored = IN.quantize(x)
        return IN.dequantize(stored) + OUT.dequantize(stored)

    program = torch.export.export(Function(net), (torch.ones(2),))
    with pytest.raises(QuantizationError, match="with another scale or zero point"):
        XnnpackPartitioner().partition(program)


@pytest.mark.parametrize(
    ("group", "name", "value", "message"),
    [
        (0, "axis", 1, r"4 scales along dimension 1 of \[4, 8\] in .*dequantize_per_channel"),
        (0, "axis", 2, "4 scales along dimension 2"),
        (0, "axis", -3, "4 scales along dimension -3"),
        (4, "group_size", 3, r"groups of 3 in .*_group.*, which do not divide \[4, 8\]"),
        (4, "group_size", 0, "groups of 0"),
        (4, "group_size", -4, "groups of -4"),
        (4, "group_size", 8, "found 8 scales and 8 zero points in .*, expected 4"),
    ],
)
def test_an_axis_or_a_group_that_does_not_fit_is_one_error_with_the_node(
    group: int, name: str, value: int, message: str
) -> None:
    model = Function(lambda x, w: F.linear(x, w()), IntegerWeight(4, 8, group=group))
    program = torch.export.export(model, (torch.ones(2, 8),))
    (node,) = (one for one in program.graph.nodes if "dequantize" in str(one.target))
    args = arguments_of(node) | {name: value}
    node.args, node.kwargs = tuple(args.values()), {}
    before = str(program.graph)
    with pytest.raises(PreprocessError, match=message) as caught:
        to_backend(program, XnnpackPartitioner())
    assert isinstance(caught.value.__cause__, QuantizationError)
    assert str(program.graph) == before


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: qd.quantize_per_tensor(x, 0.1, 3, 0, 255, torch.uint8), "uint8"),
        (lambda x: qd.quantize_per_tensor(x, 0.1, 3, -127, 127, torch.int8), "-127 to 127"),
        (lambda x: qd.choose_qparams.tensor(x, -127, 127, 0.1, torch.int8)[0], "-127 to 127"),
        (by_tensor, "rounds in layers of integers only"),
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
        (delegate,) = delegates(
            lower(Function(function, weight), (torch.ones(2, 128),), XnnpackPartitioner())
        )
        assert sum(map(len, named_data(delegate).values())) == 64 * 64 + 64 * 4


def small_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.Hardswish(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.LayerNorm(8),
        nn.Linear(8, 5),
        nn.Softmax(-1),
    ).eval()


@pytest.mark.parametrize(
    ("dtype", "precision", "tolerance"),
    [
        (torch.float16, None, 4e-3),
        (torch.float16, "fp32", 4e-3),
        (torch.bfloat16, None, 3e-2),
        (torch.float32, "fp16", 2e-3),
    ],
)
def test_halves_equal_float32_to_their_precision(
    dtype: torch.dtype, precision: str | None, tolerance: float
) -> None:
    torch.manual_seed(3)
    model, x = small_net(), torch.randn(2, 3, 9, 9)
    with torch.no_grad():
        wanted = model(x)
        one = QuantizedCase("halves", model.to(dtype), (x.to(dtype),))
    delegate = taken_whole(one, XnnpackPartitioner(precision))
    (found,) = run(delegate, one.inputs)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), wanted, rtol=0, atol=tolerance)


def test_precision_fp16_stores_filters_in_half_the_bytes() -> None:
    model, x = small_net(), torch.randn(2, 3, 9, 9)
    sizes = []
    for precision in (None, "fp16"):
        graph = graph_of(model, x, precision=precision)
        layers = [node for node in graph.nodes if "bias_id" in dict(node.operator.fields)]
        values = {value.id: value for value in graph.values}
        filters = [values[node.inputs[1]] for node in layers]
        sizes.append(sum(one.constant.size for one in filters if one.constant is not None))
    assert sizes[1] < 0.7 * sizes[0]


def test_a_precision_that_there_is_not_is_refused() -> None:
    with pytest.raises(XnnpackError, match="found the precision 'int8'"):
        XnnpackPartitioner("int8")
