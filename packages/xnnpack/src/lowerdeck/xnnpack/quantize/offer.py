"""The ways to quantise that ``lowerdeck lower --quantize`` is offered."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram

from lowerdeck.xnnpack.compile import XnnpackPartitioner

_GROUP = 32
_INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]  # torch's stubs lack it
_EXTRA = "this needs torchao: pip install lowerdeck-xnnpack[quantize]"


class XnnpackQuantization:
    """Quantises models for XNNPACK, with torchao where numbers become integers.

    Attributes:
        modes: What each way does, by name.
        calibrated: Those that look at samples of inputs.
    """

    modes: Mapping[str, str] = {
        "int8": "weights and activations in 8 bits",
        "int8-dynamic": "weights in 8 bits, activations when it runs",
        "8da4w": f"linear weights in 4 bits, groups of {_GROUP}, activations in 8 when it runs",
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
    ) -> tuple[ExportedProgram, XnnpackPartitioner]:
        """Return a quantised program of a model, and the partitioner for it.

        Args:
            mode: One of ``modes``.
            module: The model, in evaluation mode; it is not changed.
            args: Example inputs.
            kwargs: Example inputs that are given by name.
            samples: Inputs to calibrate ``"int8"`` with, positional ones and those by name; the
                example inputs are the only sample without any.

        Raises:
            ModuleNotFoundError: torchao is not installed.
        """
        named = dict(kwargs)
        if mode == "fp16":
            return torch.export.export(module, args, named), XnnpackPartitioner(precision="fp16")
        if mode == "8da4w":
            changed = _with_four_bits(copy.deepcopy(module))
            return torch.export.export(changed, args, named), XnnpackPartitioner()
        steps = _torchao("torchao.quantization.pt2e.quantize_pt2e")
        dynamic = mode == "int8-dynamic"
        quantizer = _torchao("lowerdeck.xnnpack.quantizer").XnnpackQuantizer(dynamic=dynamic)
        exported = torch.export.export(copy.deepcopy(module), args, named).module()
        prepared = steps.prepare_pt2e(exported, quantizer)
        with torch.no_grad():
            # The weights are looked at in a call as well, whatever it is given.
            for sample, by_name in samples or [(args, named)]:
                prepared(*sample, **by_name)
        converted = steps.convert_pt2e(prepared)
        return torch.export.export(converted, args, named), XnnpackPartitioner()


def _with_four_bits(module: torch.nn.Module) -> torch.nn.Module:
    """Quantise the linear layers whose rows can be divided into groups, in place."""
    torchao = _torchao("torchao.quantization")
    granularity = _torchao("torchao.quantization.granularity").PerGroup(_GROUP)
    config = torchao.Int8DynamicActivationIntxWeightConfig(
        weight_dtype=_INT4, weight_granularity=granularity
    )
    torchao.quantize_(module, config, filter_fn=_has_groups)
    # Programs with tensors of torchao's own classes can only be taken apart as a whole.
    _torchao("torchao.utils").unwrap_tensor_subclass(module)
    return module


def _has_groups(module: torch.nn.Module, _name: str) -> bool:
    return isinstance(module, torch.nn.Linear) and module.in_features % _GROUP == 0


def _torchao(name: str) -> Any:
    """Return a module that there is with torchao alone."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torchao":
            raise
        raise ModuleNotFoundError(_EXTRA, name=error.name) from error
