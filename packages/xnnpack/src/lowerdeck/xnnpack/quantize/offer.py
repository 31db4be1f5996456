"""Quantisation modes of ``lowerdeck lower --quantize`` for XNNPACK."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from lowerdeck.torch_base import copy_module
from lowerdeck.xnnpack.compile import XnnpackPartitioner
from lowerdeck.xnnpack.emit import named

_GROUP = 32
_INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]  # torch's stubs lack it
_RECURRENT = named("lstm.input gru.input lstm_cell gru_cell")
_EXTRA = "this needs torchao: pip install lowerdeck-xnnpack[quantize]"


class XnnpackQuantization:
    """Quantises models for XNNPACK; the integer modes use torchao.

    Attributes:
        modes: Descriptions of the modes, by name.
        calibrated: Modes that need samples of inputs.
    """

    modes: Mapping[str, str] = {
        "int8": "weights and activations in 8 bits",
        "int8-dynamic": "weights in 8 bits; activations in 8 at run time",
        "8da4w": f"linear weights in 4 bits, groups of {_GROUP}; activations in 8 at run time",
        "fp16": "weights in float16, computed in float32",
    }
    calibrated: Collection[str] = frozenset({"int8"})

    def quantize(
        self,
        mode: str,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        samples: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]],
        dynamic_shapes: Any = None,
    ) -> tuple[ExportedProgram, XnnpackPartitioner]:
        """Quantise a model; return its program and a partitioner for it.

        Args:
            module: The model in evaluation mode; not changed.
            kwargs: Example keyword inputs.
            samples: Calibration inputs of ``"int8"``, positional and keyword; the example inputs
                by default.
            dynamic_shapes: As for ``torch.export.export``.

        Raises:
            ModuleNotFoundError: torchao is not installed.
        """
        keywords = dict(kwargs)
        export = partial(
            torch.export.export, args=args, kwargs=keywords, dynamic_shapes=dynamic_shapes
        )
        if mode == "fp16":
            return export(module), XnnpackPartitioner(precision="fp16")
        if mode == "8da4w":
            return export(_with_four_bits(copy_module(module))), XnnpackPartitioner()
        steps = _torchao("torchao.quantization.pt2e.quantize_pt2e")
        dynamic = mode == "int8-dynamic"
        quantizer = _torchao("lowerdeck.xnnpack.quantizer").XnnpackQuantizer(dynamic=dynamic)
        program = export(copy_module(module))
        if dynamic:
            program = _unroll_recurrent_layers(program)
        prepared = steps.prepare_pt2e(program.module(), quantizer)
        with torch.no_grad():
            # Weight observers need one call, with any inputs.
            for sample, by_name in samples or [(args, keywords)]:
                prepared(*sample, **by_name)
        converted = steps.convert_pt2e(prepared)
        return export(converted), XnnpackPartitioner()

    def why_float(self, mode: str, node: Node) -> str | None:
        """Return why the weight that a node reads stays float, or None without a reason.

        Args:
            node: The node of the quantised program.
        """
        name = str(node.target).removeprefix("aten.").partition(".")[0]
        if name == "embedding":
            return "XNNPACK has no embedding"
        if mode == "fp16":
            return None
        if name.removesuffix("_cell") in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
            return f"{name} is not quantised in {mode}; int8-dynamic quantises LSTM and GRU"
        if "weight_norm" in name:
            return f"a weight is computed from it ({name}); remove_weight_norm stores the weight"
        if name == "linear" and mode == "8da4w":
            return f"its rows cannot be divided into groups of {_GROUP}"
        if name.startswith("conv"):
            return _why_float_convolution(mode, node)
        return f"{name} is not quantised"


def _why_float_convolution(mode: str, node: Node) -> str:
    if mode == "8da4w":
        return "only linear layers have weights in 4 bits; int8 and int8-dynamic take convolutions"
    if node.meta["val"].dim() == 5:
        return "XNNPACK has no convolution over three dimensions"
    if "transpose" in str(node.target):
        return "it is a transposed convolution of several groups"
    return "XNNPACK has no depthwise convolution whose input is quantised at run time"


def _unroll_recurrent_layers(program: ExportedProgram) -> ExportedProgram:
    """Decompose LSTM, GRU and their cells, which quantisers do not support, to linear layers."""
    table = torch.export.default_decompositions()
    unrolled: ExportedProgram = program.run_decompositions({op: table[op] for op in _RECURRENT})
    return unrolled


def _with_four_bits(module: torch.nn.Module) -> torch.nn.Module:
    """Quantise in place the linear layers whose rows divide into groups."""
    torchao = _torchao("torchao.quantization")
    granularity = _torchao("torchao.quantization.granularity").PerGroup(_GROUP)
    config = torchao.Int8DynamicActivationIntxWeightConfig(
        weight_dtype=_INT4, weight_granularity=granularity
    )
    torchao.quantize_(module, config, filter_fn=_has_groups)
    # Programs with torchao's tensor subclasses can only be decomposed as a whole.
    _torchao("torchao.utils").unwrap_tensor_subclass(module)
    return module


def _has_groups(module: torch.nn.Module, _name: str) -> bool:
    """Return whether torchao can quantise a layer: its weight is a parameter, in whole groups."""
    is_linear = isinstance(module, torch.nn.Linear) and module.in_features % _GROUP == 0
    # torchao fails on computed weights, such as those of weight_norm.
    return is_linear and "weight" in dict(module.named_parameters(recurse=False))


def _torchao(name: str) -> Any:
    """Import a module that needs torchao; an error names the extra to install."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torchao":
            raise
        raise ModuleNotFoundError(_EXTRA, name=error.name) from error
