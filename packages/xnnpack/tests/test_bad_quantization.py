"""Quantisation that makes no sense: one typed error with the node, in each mode.

The arguments of each mode's operators are changed in the exported program. What is no error is
left to other kernels, with the reason.
"""

from __future__ import annotations

import copy
import importlib
import math
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from case_making import Function  # type: ignore[import-not-found]
from quantized_cases import IN, OUT, IntegerWeight, Step, by_row, by_tensor  # type: ignore[import-not-found]
from torch import nn
from torch.export import ExportedProgram
from xnnpack_lowering import lower  # type: ignore[import-not-found]

from lowerdeck.lowered_module import LoweringError, PreprocessError, SignatureError, to_backend
from lowerdeck.torch_base import arguments_of
from lowerdeck.xnnpack import QuantizationError, XnnpackPartitioner

Tensor = torch.Tensor
ROWS = (torch.randn(3, 64, generator=torch.Generator().manual_seed(0)),)
MODES: dict[str, tuple[Any, dict[str, Any]]] = {
    "static, channels": (lambda x, w: OUT(F.linear(IN(x), w())), {}),
    "static, tensor": (lambda x, w: OUT(F.linear(IN(x), w())), {"axis": None}),
    "rows": (lambda x, w: F.linear(by_row(x), w()), {}),
    "rows, groups": (lambda x, w: F.linear(by_row(x), w()), {"group": 32, "bits": 4}),
    "tensor": (lambda x, w: F.linear(by_tensor(x), w()), {}),
    "weights": (lambda x, w: F.linear(x, w()), {}),
    "weights, 4 bits": (lambda x, w: F.linear(x, w()), {"bits": 4}),
}
CHANGES: dict[str, tuple[Any, ...]] = {
    "scale": (0.0, -0.01, math.nan, math.inf, 1e-39),
    "zero_point": (-129, 3000),
    "axis": (1, 5, -7),
    "group_size": (0, -1, 7, 63),
}


@cache
def _exported(mode: str) -> ExportedProgram:
    function, options = MODES[mode]
    return torch.export.export(Function(function, IntegerWeight(32, 64, **options)), ROWS)


def program_of(mode: str) -> ExportedProgram:
    """Return a program to change."""
    return copy.deepcopy(_exported(mode))


def changed(program: ExportedProgram, call: str, name: str, value: Any, at: int = -1) -> str:
    """Change an argument of a call of an operator, the last by default; return its name."""
    node = [one for one in program.graph.nodes if call in str(one.target)][at]
    node.args, node.kwargs = tuple((arguments_of(node) | {name: value}).values()), {}
    return str(node.name)


def failure(program: ExportedProgram, partitioner: XnnpackPartitioner) -> Exception | None:
    """Return what lowering a program raises."""
    try:
        to_backend(program, partitioner)
    except (LoweringError, QuantizationError) as error:
        return error
    return None


def every_change() -> list[tuple[str, str, str, Any]]:
    found = []
    for mode in MODES:
        nodes = _exported(mode).graph.nodes
        calls = {str(node.target): node for node in nodes if "quantized_dec" in str(node.target)}
        for call, node in calls.items():
            for name, given in arguments_of(node).items():
                if not isinstance(given, torch.fx.Node):
                    found += [(mode, call, name, value) for value in CHANGES.get(name, ())]
    return found


@pytest.mark.parametrize(("mode", "call", "name", "value"), every_change())
def test_a_wrong_argument_is_one_error_with_the_node(
    mode: str, call: str, name: str, value: Any
) -> None:
    program = program_of(mode)
    changed(program, call, name, value)
    before = str(program.graph)
    partitioner = XnnpackPartitioner()
    error = failure(program, partitioner)
    if error is not None:
        cause = error if isinstance(error, QuantizationError) else error.__cause__
        assert isinstance(cause, QuantizationError), error
        assert call in str(cause)
    else:
        # XNNPACK has left it, with a reason, to those who do what it says.
        assert partitioner.refused, "computed as if it had not been said"
    assert str(program.graph) == before


@pytest.mark.parametrize("scale", [0.0, -0.5, math.nan, math.inf, 1e-39])
def test_a_scale_of_a_channel_that_is_none_is_one_error_with_the_node(scale: float) -> None:
    weight = IntegerWeight(4, 8)
    weight.scales[2] = scale
    with pytest.raises(PreprocessError, match=r"found the scale .*dequantize_per_channel"):
        lower(Function(lambda x, w: F.linear(x, w()), weight), (torch.ones(2, 8),))
    with pytest.raises(QuantizationError, match=r"found the scale .*quantize_per_tensor"):
        lower(Function(Step(scale).quantize), (torch.ones(2),))


@pytest.mark.parametrize(
    ("group", "name", "value", "message"),
    [
        (0, "axis", 1, r"4 scales along dimension 1 of \[4, 8\] in .*dequantize_per_channel"),
        (0, "axis", -3, "4 scales along dimension -3"),
        (4, "group_size", 3, r"groups of 3 for the shape \[4, 8\] in .*_group"),
        (4, "group_size", 8, "found 8 scales and 8 zero points in .*, expected 4"),
    ],
)
def test_an_axis_or_a_group_that_does_not_fit_says_what_does(
    group: int, name: str, value: int, message: str
) -> None:
    model = Function(lambda x, w: F.linear(x, w()), IntegerWeight(4, 8, group=group))
    program = torch.export.export(model, (torch.ones(2, 8),))
    changed(program, "dequantize", name, value)
    with pytest.raises(PreprocessError, match=message):
        to_backend(program, XnnpackPartitioner())


@pytest.mark.parametrize(("axis", "group"), [(0, 0), (None, 0), (0, 32)])
@pytest.mark.parametrize("rows", [None, by_row, IN])
@pytest.mark.parametrize("wrong", [-9, 8, 127])
def test_integers_beyond_half_a_byte_are_refused(
    axis: int | None, group: int, rows: Any, wrong: int
) -> None:
    # The limits say 4 bits, and torch takes no notice of them: the values went into neighbours.
    weight = IntegerWeight(32, 64, axis=axis, group=group, bits=4)
    weight.integers[3, 5] = wrong
    net = Function(lambda x, w: F.linear(x if rows is None else rows(x), w()), weight)
    error = failure(torch.export.export(net, ROWS), XnnpackPartitioner())
    assert error is not None
    said = f"{error} {error.__cause__}"
    assert "because the declared limits are those of 4 bits" in said
    assert str(wrong) in said
    assert "dequantize" in said


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("scales", torch.ones(31), r"found \[31\] .* 'parts.0.scales', which quantized_decomp"),
        ("scales", torch.ones(32, dtype=torch.float64), "of torch.float64 for"),
        ("zeros", torch.zeros(0, dtype=torch.int64), r"found \[0\] .* 'parts.0.zeros'"),
    ],
)
def test_tensors_that_do_not_fit_any_more_are_one_error_with_the_node(
    name: str, tensor: Tensor, message: str
) -> None:
    program = program_of("weights")
    program.state_dict[f"parts.0.{name}"] = tensor
    with pytest.raises(SignatureError, match=message):
        to_backend(program, XnnpackPartitioner())


def _config(kind: str) -> Any:
    torchao = pytest.importorskip("torchao.quantization")
    groups = importlib.import_module("torchao.quantization.granularity").PerGroup(32)
    four: dict[str, Any] = {"weight_dtype": vars(torch)["int4"]}
    return {
        "8da4w": lambda: torchao.Int8DynamicActivationIntxWeightConfig(
            weight_granularity=groups, **four
        ),
        "8da8w, mm": lambda: torchao.Int8DynamicActivationInt8WeightConfig(
            set_inductor_config=False
        ),
        "w8": lambda: torchao.Int8WeightOnlyConfig(set_inductor_config=False),
        "w4": lambda: torchao.IntxWeightOnlyConfig(granularity=groups, **four),
    }[kind]()


def torchaos(kind: str) -> ExportedProgram:
    """Return a program of two layers that torchao quantised."""
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)).eval()
    config = _config(kind)
    importlib.import_module("torchao.quantization").quantize_(model, config)
    return torch.export.export(model, ROWS)


@pytest.mark.filterwarnings("ignore")  # torchao raises dozens against itself
@pytest.mark.parametrize("wrong", [0.0, math.nan, 1e-39, "short", "float64"])
@pytest.mark.parametrize("kind", ["8da4w", "8da8w, mm", "w8", "w4"])
def test_scales_of_torchaos_layers_that_are_none_are_one_error_with_the_node(
    kind: str, wrong: float | str
) -> None:
    program = torchaos(kind)
    weight: Any = program.state_dict["2.weight"]
    if isinstance(wrong, str):
        weight.scale = weight.scale[:-1] if wrong == "short" else weight.scale.double()
    else:
        weight.scale = weight.scale.clone()
        weight.scale.view(-1)[1] = wrong
    with pytest.raises(LoweringError, match="found ") as caught:
        to_backend(program, XnnpackPartitioner())
    if isinstance(wrong, str):
        assert isinstance(caught.value, SignatureError)
        assert "for '2.weight.scale', which " in str(caught.value)
    else:
        assert isinstance(caught.value.__cause__, QuantizationError)
        assert "found the scale" in str(caught.value)
