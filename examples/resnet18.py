"""ResNet-18 in plain torch: seeded weights, evaluation mode, one 224x224 image.

Lower it with ``lowerdeck lower examples.resnet18:example --backend NAME -o resnet18.pte``.
"""

from __future__ import annotations

import torch
from torch import nn


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut, each followed by batch normalisation."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride, bias=False),
                nn.BatchNorm2d(channels_out),
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's features for ``x`` of shape ``[N, channels_in, H, W]``."""
        y = torch.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return torch.relu(y + self.shortcut(x))


class ResNet18(nn.Module):
    """The 18-layer residual network of He et al. (2015) for ``classes`` classes."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.stem_norm = nn.BatchNorm2d(64)
        self.stem_pool = nn.MaxPool2d(3, stride=2, padding=1)
        blocks = []
        channels = 64
        for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            blocks += [ResidualBlock(channels, width, stride), ResidualBlock(width, width, 1)]
            channels = width
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(512, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits of shape ``[N, classes]`` for ``images`` of shape ``[N, 3, H, W]``."""
        x = self.stem_pool(torch.relu(self.stem_norm(self.stem(images))))
        x = self.pool(self.blocks(x))
        return self.classifier(torch.flatten(x, 1))


def example() -> tuple[nn.Module, tuple[torch.Tensor]]:
    """Return the model with seeded weights and statistics, and one seeded image."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(18)
        model = ResNet18()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                # A trained model's statistics are not 0 and 1: a wrong fold of them must show.
                nn.init.normal_(module.running_mean, std=0.1)
                nn.init.uniform_(module.running_var, 0.5, 1.5)
        return model.eval(), (torch.randn(1, 3, 224, 224),)
