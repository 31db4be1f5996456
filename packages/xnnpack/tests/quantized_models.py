"""OperatorPattern small models, and how their users quantise them: with PT2E and with torchao."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from lowerdeck_zoo.models.layers import Decoder, Mlp, SmallCnn, SmallMobileNet

QUANTIZE = "torchao.quantization.pt2e.quantize_pt2e"
ANNOTATOR = "executorch.backends.xnnpack.quantizer.xnnpack_quantizer"
Tensor = torch.Tensor


def model_and_inputs(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return a model with random weights and statistics, and its inputs.

    Args:
        name: ``"cnn"``, ``"mlp"``, ``"decoder"`` or ``"mobilenet"``.
    """
    kinds = {"cnn": SmallCnn, "mlp": Mlp, "decoder": Decoder, "mobilenet": SmallMobileNet}
    shapes = {"mlp": (3, 64), "decoder": (1, 12, 64)}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = kinds[name]().eval()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.normal_(module.get_buffer("running_mean"), std=0.3)
                nn.init.uniform_(module.get_buffer("running_var"), 0.5, 2)
        return model, (torch.randn(shapes.get(name, (1, 3, 32, 32))),)


def with_pt2e(
    model: nn.Module, inputs: tuple[Tensor, ...], *, annotator: str = "peer", **options: Any
) -> ExportedProgram:
    """Return a program that PT2E quantised.

    Args:
        annotator: ``"peer"`` for ExecuTorch's, ``"ours"`` for this package's.
    """
    steps = importlib.import_module(QUANTIZE)
    if annotator == "peer":
        peer = importlib.import_module(ANNOTATOR)
        settings = peer.get_symmetric_quantization_config(**options)
        quantizer = peer.XNNPACKQuantizer().set_global(settings)
    else:
        own = importlib.import_module("lowerdeck.xnnpack.quantizer")
        named = {name.removeprefix("is_"): value for name, value in options.items()}
        quantizer = own.XnnpackQuantizer(**named)
    is_qat = options.get("is_qat", False)
    prepare = steps.prepare_qat_pt2e if is_qat else steps.prepare_pt2e
    prepared = prepare(torch.export.export(model.train(is_qat), inputs).module(), quantizer)
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        prepared(*(_like(one, generator) for one in inputs))
    prepared(*inputs)
    importlib.import_module("torchao.quantization.pt2e").move_exported_model_to_eval(prepared)
    return torch.export.export(steps.convert_pt2e(prepared), inputs)


def _like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Return a sample in the place of an input: tokens stay as they are."""
    return torch.randn(tensor.shape, generator=generator) if tensor.is_floating_point() else tensor


def with_torchao(
    model: nn.Module, inputs: tuple[Tensor, ...], config: str, group: int | None, dtype: Any
) -> ExportedProgram:
    """Return a program of a model that torchao's ``quantize_`` changed.

    Args:
        model: The model, changed in place.
        config: Name of torchao's configuration.
        group: Elements of a row that share a scale, None for one scale for each row.
        dtype: What the weights become.
    """
    torchao = importlib.import_module("torchao.quantization")
    kinds = importlib.import_module("torchao.quantization.granularity")
    chosen = kinds.PerGroup(group) if group else kinds.PerAxis(0)
    named = "granularity" if config == "IntxWeightOnlyConfig" else "weight_granularity"
    torchao.quantize_(model, getattr(torchao, config)(**{"weight_dtype": dtype, named: chosen}))
    return torch.export.export(model, inputs)
