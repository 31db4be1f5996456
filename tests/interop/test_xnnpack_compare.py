"""``compare`` inside delegates of small integers: silent on right files, right about others."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from quantized_models import model_and_inputs, with_pt2e, with_torchao
from torch.export import ExportedProgram

from lowerdeck.emitter import emit
from lowerdeck.lowered_module import to_backend
from lowerdeck.runner import Comparison, compare, load
from lowerdeck.xnnpack import XnnpackPartitioner

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    TORCHAO = pytest.importorskip("torchao")
Inputs = tuple[torch.Tensor, ...]
STATIC: dict[str, Any] = {"is_per_channel": True}
DYNAMIC: dict[str, Any] = {"is_per_channel": True, "is_dynamic": True}
IN_GROUPS = ("Int8DynamicActivationIntxWeightConfig", 32, torch.int4)
BY_ROWS = ("Int8DynamicActivationIntxWeightConfig", None, torch.int8)
WEIGHTS_ONLY = ("IntxWeightOnlyConfig", None, torch.int8)


def quantized(name: str, mode: Any) -> tuple[ExportedProgram, Inputs]:
    """Return a quantised program: with PT2E by options, with torchao by a configuration."""
    model, inputs = model_and_inputs(name)
    if not isinstance(mode, dict):
        return with_torchao(model, inputs, *mode), inputs
    return with_pt2e(model, inputs, annotator="ours", **mode), inputs


def compared(given: ExportedProgram, right: ExportedProgram, inputs: Inputs) -> Comparison:
    """Return how the file of one program differs from what another one computes."""
    emitted = emit(to_backend(given, XnnpackPartitioner()))
    return compare(load(emitted.to_bytes(), debug=emitted), right, inputs)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *(("cnn", STATIC), ("cnn", {"is_per_channel": False}), ("mlp", STATIC)),
        *(("mobilenet", STATIC), ("decoder", STATIC), ("mlp", DYNAMIC), ("decoder", DYNAMIC)),
        *(("cnn", DYNAMIC), ("mlp", IN_GROUPS), ("decoder", IN_GROUPS), ("mlp", BY_ROWS)),
        *(("decoder", BY_ROWS), ("mlp", WEIGHTS_ONLY), ("decoder", WEIGHTS_ONLY)),
    ],
    ids=str,
)
def test_nothing_is_said_of_right_files(name: str, mode: Any) -> None:
    program, inputs = quantized(name, mode)
    comparison = compared(program, program, inputs)
    assert comparison.first is None, str(comparison)
    assert comparison.compared >= 4


def _weight_of(program: ExportedProgram, layer: str, what: str) -> torch.Tensor:
    """Return a layer's integers (``"input"``) or ``"scales"`` where the program has them."""
    node = next(one for one in program.graph.nodes if one.name == layer)
    integers, scales, *_ = node.args[1].args
    signature = program.graph_signature
    names = {**signature.inputs_to_buffers, **signature.inputs_to_parameters}
    name = names[{"input": integers, "scales": scales}[what].name]
    held = program.state_dict[name] if name in program.state_dict else program.constants[name]
    assert isinstance(held, torch.Tensor)
    return held


def _with_other_weights(program: ExportedProgram, layer: str, what: str) -> ExportedProgram:
    spoilt = copy.deepcopy(program)
    tensor = _weight_of(spoilt, layer, what)
    with torch.no_grad():
        if what == "scales":
            tensor[1] *= 4
        else:
            tensor[1] = 127 - tensor[1].clamp(min=0)
    return spoilt


@pytest.mark.parametrize("what", ["input", "scales"])
@pytest.mark.parametrize(
    ("name", "mode", "layer", "module"),
    [
        ("cnn", STATIC, "conv2d_1", "deep"),
        ("cnn", STATIC, "conv2d_2", "point"),
        ("mlp", DYNAMIC, "linear_1", "layers.1"),
        ("mlp", STATIC, "linear_1", "layers.1"),
    ],
)
def test_the_layer_with_a_changed_weight_is_named(
    name: str, mode: Any, layer: str, module: str, what: str
) -> None:
    program, inputs = quantized(name, mode)
    comparison = compared(_with_other_weights(program, layer, what), program, inputs)
    assert comparison.first is not None
    assert module in comparison.first.place.module_path.split("; "), str(comparison)
    assert comparison.first.label in ("Conv2d", "DepthwiseConv2d", "FullyConnected")


@pytest.mark.parametrize("factor", [0.5, 4.0])
def test_an_activation_with_another_scale_is_named(factor: float) -> None:
    program, inputs = quantized("cnn", STATIC)
    spoilt = copy.deepcopy(program)
    node = next(one for one in spoilt.graph.nodes if one.name == "conv2d_2")
    (quantize,) = node.users
    for one in (quantize, *quantize.users):
        first, scale, *rest = one.args
        one.args = (first, scale * factor, *rest)
    comparison = compared(spoilt, program, inputs)
    assert comparison.first is not None
    assert comparison.first.place.node == "conv2d_2"
    assert comparison.first.label == "Conv2d"
