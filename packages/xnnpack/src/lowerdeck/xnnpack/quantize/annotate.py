"""PT2E annotations in ``node.meta``: quantisation specs of inputs and outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, SharedQuantizationSpec
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from lowerdeck.xnnpack.quantize.specs import Specs

_ATEN = torch.ops.aten
Accepts = Callable[[Node], bool]

RELU = {_ATEN.relu.default, _ATEN.relu_.default}
LINEAR = {_ATEN.linear.default}
# XNNPACK has no 3-D convolution.
CONVOLUTION = {
    *(_ATEN.conv1d.default, _ATEN.conv1d.padding),
    *(_ATEN.conv2d.default, _ATEN.conv2d.padding),
}
TRANSPOSED = {_ATEN.conv_transpose1d.default, _ATEN.conv_transpose2d.input}
BATCH_NORM = {_ATEN.batch_norm.default}
BINARY = {_ATEN.add.Tensor, _ATEN.add_.Tensor, _ATEN.mul.Tensor, _ATEN.mul_.Tensor}
# Their results share the scale of their inputs.
SHARING = {
    *RELU,
    *(_ATEN.hardtanh.default, _ATEN.hardtanh_.default),
    *(_ATEN.max_pool2d.default, _ATEN.adaptive_avg_pool2d.default),
    *(_ATEN.mean.default, _ATEN.mean.dim),
    *(_ATEN.permute.default, _ATEN.transpose.int, _ATEN.squeeze.dim),
    *(_ATEN.view.default, _ATEN.reshape.default, _ATEN.flatten.using_ints),
    *(_ATEN.permute_copy.default, _ATEN.squeeze_copy.dim, _ATEN.view_copy.default),
    _ATEN.slice_copy.Tensor,
}
# HistogramObserver fails on larger numbers in torch.histc.
_LARGEST_OBSERVED = 3.4028235e15


def annotate_layers(graph_module: GraphModule, specs: Specs, accepts: Accepts) -> None:
    """Annotate convolutions and linear layers, with the batch norm and relu after them, in place.

    Args:
        accepts: Whether a node may be quantised.
    """
    for node in _calls(graph_module, LINEAR | CONVOLUTION | TRANSPOSED):
        if not accepts(node) or not _is_float(node) or not _can_be_quantised(node, specs):
            continue
        weight = specs.transposed_weight if node.target in TRANSPOSED else specs.weight
        inputs = {node.args[0]: specs.activation, node.args[1]: weight}
        _annotate_with_last(node, inputs, specs, accepts)


def annotate_arithmetic(graph_module: GraphModule, specs: Specs, accepts: Accepts) -> None:
    """Annotate additions, multiplications and concatenations, in place.

    Args:
        accepts: Whether a node may be quantised.
    """
    for node in _calls(graph_module, BINARY):
        sources = [operand for operand in node.args if isinstance(operand, Node)]
        if not accepts(node) or not all(_is_float(operand) for operand in (node, *sources)):
            continue
        if any(_is_too_large(operand, graph_module) for operand in sources):
            continue
        _annotate_with_last(node, dict.fromkeys(sources, specs.activation), specs, accepts)
    for node in _calls(graph_module, {_ATEN.cat.default}):
        joined: Any = node.args[0]
        if accepts(node) and all(_is_float(operand) for operand in joined):
            first = next((operand for operand in joined if _has_scale(operand)), joined[0])
            shared = SharedQuantizationSpec((first, node))
            _annotate(node, {**dict.fromkeys(joined, shared), first: specs.activation}, shared)


def share_scales(graph_module: GraphModule, specs: Specs, accepts: Accepts) -> None:
    """Make operators that move, clamp or average quantised tensors share their scales, in place.

    Adaptive average pools are quantised regardless of their input.

    Args:
        accepts: Whether a pool may be quantised.
    """
    for node in _calls(graph_module, SHARING):
        source = node.args[0]
        if _output_of(source) is not None:
            shared = SharedQuantizationSpec(source)
            _annotate(node, {source: shared}, shared)
        elif (
            node.target == _ATEN.adaptive_avg_pool2d.default and accepts(node) and _is_float(node)
        ):
            _annotate(node, {source: specs.activation}, SharedQuantizationSpec((source, node)))


def is_annotated(node: Node) -> bool:
    """Return whether a quantiser has already processed a node."""
    return node.meta.get(Q_ANNOTATION_KEY) is not None


def _calls(graph_module: GraphModule, targets: set[Any]) -> Iterator[Node]:
    for node in graph_module.graph.nodes:
        if node.op == "call_function" and node.target in targets and not is_annotated(node):
            yield node


def _annotate(node: Node, inputs: dict[Any, Any], output: Any = None) -> None:
    node.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation(
        input_qspec_map=inputs, output_qspec=output, _annotated=True
    )


def _annotate_with_last(
    node: Node, inputs: dict[Any, Any], specs: Specs, accepts: Accepts
) -> None:
    """Annotate a node; the output spec goes to the last node that is fused with it."""
    _annotate(node, inputs)
    last = _last_of(node, specs)
    last = last if accepts(last) else node
    if not is_annotated(last):
        _annotate(last, {})
    last.meta[Q_ANNOTATION_KEY].output_qspec = specs.output


def _output_of(node: Any) -> Any:
    annotation = node.meta.get(Q_ANNOTATION_KEY) if isinstance(node, Node) else None
    return annotation.output_qspec if annotation is not None else None


def _last_of(node: Node, specs: Specs) -> Node:
    """Return the last node fused with a layer, such as a relu."""
    if specs.dynamic:
        return node
    last = node
    # torchao folds batch norms only in QAT, and only after these operators.
    if specs.qat and node.target in {_ATEN.conv1d.default, _ATEN.conv2d.default, *TRANSPOSED}:
        last = _only_user(node, BATCH_NORM) or node
    return _only_user(last, RELU) or last


def _only_user(node: Node, targets: set[Any]) -> Node | None:
    user = next(iter(node.users), None)
    return user if len(node.users) == 1 and user is not None and user.target in targets else None


def _has_scale(node: Node) -> bool:
    """Return whether a result, skipping data movement, is already quantised."""
    while _output_of(node) is None:
        source = node.args[0] if node.args else None
        if node.target not in SHARING or not isinstance(source, Node):
            return False
        node = source
    return True


def _is_float(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype == torch.float32


def _is_too_large(node: Node, graph_module: GraphModule) -> bool:
    """Return whether a constant has values that observers cannot handle, such as a mask's -inf."""
    if node.op != "get_attr":
        return False
    module, _, name = str(node.target).rpartition(".")
    value = getattr(graph_module.get_submodule(module), name)
    largest = float(value.abs().max()) if value.numel() else 0.0
    return not math.isfinite(largest) or largest > _LARGEST_OBSERVED


def _can_be_quantised(node: Node, specs: Specs) -> bool:
    """Return whether XNNPACK can compute this layer on integers with these specs."""
    weight: Any = node.args[1]
    shape: Any = weight.meta["val"].shape if isinstance(weight, Node) else ()
    if node.target in TRANSPOSED:
        # Per-channel scales would cover the channels of one group only.
        grouped = node.meta["val"].shape[1] != shape[1]
        return bool(shape) and not grouped
    if node.target in CONVOLUTION and specs.dynamic:
        # XNNPACK has no dynamically quantised depthwise convolution.
        return bool(shape) and shape[1] != 1
    return bool(shape)
