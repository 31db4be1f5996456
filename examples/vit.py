"""A small vision transformer (ViT-Tiny) in plain torch with seeded weights.

Lower it with ``lowerdeck lower examples.vit:example --backend XnnpackBackend -o vit.pte``.
"""

from __future__ import annotations

import torch
from torch import nn


class Attention(nn.Module):
    """Multi-head self-attention over tokens."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return attended tokens of the shape ``[N, T, width]`` of ``tokens``."""
        batch, count, width = tokens.shape
        qkv = self.to_qkv(tokens).view(batch, count, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        return self.project(mixed.transpose(1, 2).reshape(batch, count, width))


class EncoderBlock(nn.Module):
    """Attention and a two-layer perceptron, each after a layer norm and beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return tokens of the shape ``[N, T, width]`` of ``tokens``."""
        tokens = tokens + self.attention(self.norm1(tokens))
        return tokens + self.perceptron(self.norm2(tokens))


class VisionTransformer(nn.Module):
    """ViT of Dosovitskiy et al. (2020); the defaults are ViT-Tiny with patches of 16."""

    def __init__(
        self,
        *,
        size: int = 224,
        patch: int = 16,
        width: int = 192,
        depth: int = 12,
        heads: int = 3,
        classes: int = 1000,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.class_token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, (size // patch) ** 2 + 1, width) * 0.02)
        self.blocks = nn.Sequential(*(EncoderBlock(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits ``[N, classes]`` for ``images`` of shape ``[N, 3, size, size]``."""
        patches = self.patches(images).flatten(2).transpose(1, 2)
        class_tokens = self.class_token.expand(images.shape[0], -1, -1)
        tokens = torch.cat([class_tokens, patches], dim=1) + self.positions
        features = self.norm(self.blocks(tokens))
        logits: torch.Tensor = self.head(features[:, 0])
        return logits


def example() -> tuple[nn.Module, tuple[torch.Tensor]]:
    """Return the model with seeded weights, and one seeded image."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(16)
        return VisionTransformer().eval(), (torch.randn(1, 3, 224, 224),)
