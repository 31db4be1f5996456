"""Whole small models, and how their users quantise them: with PT2E and with torchao."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.export import ExportedProgram

QUANTIZE = "torchao.quantization.pt2e.quantize_pt2e"
ANNOTATOR = "executorch.backends.xnnpack.quantizer.xnnpack_quantizer"
Tensor = torch.Tensor


class SmallCnn(nn.Module):
    """Convolutions, one depthwise, with batch norms, an addition, a join, pools and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.deep = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.point = nn.Conv2d(16, 16, 1)
        self.last = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        x = F.max_pool2d(F.relu(self.norm(self.first(x))), 2, 2)
        y = x + self.point(F.relu(self.deep(x)))
        y = torch.cat([x, y], 1)
        result: Tensor = self.last(F.adaptive_avg_pool2d(y, 1).flatten(1))
        return result


class Mlp(nn.Module):
    """Three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 128), nn.Linear(128, 96), nn.Linear(96, 10)])

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        result: Tensor = self.layers[-1](x)
        return result


class Block(nn.Module):
    """One block of a decoder: causal attention and a gated layer, both after a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.gate, self.up = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the tokens, mixed."""
        y = self.before(x)
        batch, length, width = y.shape
        query, key, value = (
            layer(y).view(batch, length, self.heads, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        y = self.between(x)
        result: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return result


class Decoder(nn.Module):
    """Two blocks over tokens that are embedded already."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(64, 4), Block(64, 4))
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores of the next tokens."""
        result: Tensor = self.head(self.norm(self.blocks(x)))
        return result


class Inverted(nn.Module):
    """One block of a MobileNet."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        wide = 4 * inside
        self.added = stride == 1 and inside == outside
        self.layers = nn.Sequential(
            *(nn.Conv2d(inside, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6()),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False),
            *(nn.BatchNorm2d(wide), nn.ReLU6()),
            *(nn.Conv2d(wide, outside, 1, bias=False), nn.BatchNorm2d(outside)),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return features."""
        y: Tensor = self.layers(x)
        return x + y if self.added else y


class SmallMobileNet(nn.Module):
    """A stem, three blocks, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6()
        )
        self.blocks = nn.Sequential(Inverted(8, 8, 1), Inverted(8, 16, 2), Inverted(16, 16, 1))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        result: Tensor = self.head(self.blocks(self.stem(x)).mean([2, 3]))
        return result


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
        model: The model.
        inputs: Its inputs.
        annotator: ``"peer"`` for ExecuTorch's, ``"ours"`` for this package's.
        **options: Of ExecuTorch's ``get_symmetric_quantization_config``.
    """
    steps = importlib.import_module(QUANTIZE)
    if annotator == "peer":
        peer = importlib.import_module(ANNOTATOR)
        settings = peer.get_symmetric_quantization_config(**options)
        quantizer = peer.XNNPACKQuantizer().set_global(settings)
    else:
        own = importlib.import_module("lowerdeck.xnnpack.quantizer")
        quantizer = own.XnnpackQuantizer(dynamic=options.get("is_dynamic", False))
    prepared = steps.prepare_pt2e(torch.export.export(model, inputs).module(), quantizer)
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        prepared(*(_like(one, generator) for one in inputs))
    prepared(*inputs)
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
        inputs: Its inputs.
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
