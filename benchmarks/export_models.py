"""The models on which the way from an exported program to bytes is measured.

Nothing that is measured is imported here: a process that makes one has loaded torch alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from examples import vit
from examples.resnet18 import ResNet18
from lowerdeck_zoo.models.language import GPT, Llama


class Blocks(nn.Module):
    """``count`` blocks of a linear layer, an activation and a norm."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16)) for _ in range(count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


Made = tuple[nn.Module, tuple[Any, ...]]


def _tokens(length: int, words: int) -> tuple[torch.Tensor]:
    return (torch.randint(0, words, (1, length)),)


MODELS: dict[str, Callable[[], Made]] = {
    "ResNet-18": lambda: (ResNet18(), (torch.randn(1, 3, 224, 224),)),
    "ViT of 12 layers": vit.example,
    "GPT-2 (12 layers of 768)": lambda: (GPT(768, 12, 12, 50257), _tokens(64, 50257)),
    "llama of 16 layers": lambda: (Llama(64, 16, 1000), _tokens(16, 1000)),
    "256 blocks of linear, gelu, layer norm": lambda: (Blocks(256), (torch.randn(2, 16),)),
}
"""Each makes a model with random weights, and its inputs."""
