"""The models on which the way from an exported program to bytes is measured.

Nothing of ours is imported here: a process that makes one has loaded torch alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.emitter_models import GPT, ResNet18
from examples import vit


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


class LlamaLayer(nn.Module):
    """One layer of a llama: norms, grouped heads, a gated feed-forward net."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, width // 2, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        y = self.before(x)
        size = width // self.heads
        q = self.q(y).view(batch, length, -1, size).transpose(1, 2)
        k, v = (
            part(y).view(batch, length, -1, size).transpose(1, 2).repeat_interleave(2, 1)
            for part in (self.k, self.v)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        y = self.after(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def llama(layers: int) -> nn.Module:
    """Return ``layers`` layers of width 64 behind an embedding of 1,000 tokens."""
    return nn.Sequential(nn.Embedding(1000, 64), *(LlamaLayer(64, 4) for _ in range(layers)))


Made = tuple[nn.Module, tuple[Any, ...]]


def _tokens(length: int, words: int) -> tuple[torch.Tensor]:
    return (torch.randint(0, words, (1, length)),)


MODELS: dict[str, Callable[[], Made]] = {
    "ResNet-18": lambda: (ResNet18(), (torch.randn(1, 3, 224, 224),)),
    "ViT of 12 layers": vit.example,
    "GPT-2 (12 layers of 768)": lambda: (GPT(12, 768, 12, 50257), _tokens(64, 50257)),
    "llama of 16 layers": lambda: (llama(16), _tokens(16, 1000)),
    "1,024 blocks of linear, gelu, layer norm": lambda: (Blocks(1024), (torch.randn(2, 16),)),
}
"""Each makes a model with random weights, and its inputs."""
