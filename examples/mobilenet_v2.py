"""A network of inverted residuals, as MobileNet-V2 is, in plain torch with seeded weights.

Lower it with ``lowerdeck lower examples.mobilenet_v2:example --backend XnnpackBackend -o m.pte``.
"""

from __future__ import annotations

import torch
from torch import nn

# expansion, channels out, repeats, stride of the first: table 2 of Sandler et al. (2018)
STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def conv_norm(
    channels_in: int, channels_out: int, kernel: int, stride: int = 1, groups: int = 1
) -> list[nn.Module]:
    """Return a convolution that keeps the size at stride 1, and its batch normalisation."""
    return [
        nn.Conv2d(
            *(channels_in, channels_out, kernel, stride),
            padding=kernel // 2,
            groups=groups,
            bias=False,
        ),
        nn.BatchNorm2d(channels_out),
    ]


class InvertedResidual(nn.Module):
    """Widen by 1x1, filter each channel by 3x3, narrow by 1x1; add the input if it fits."""

    def __init__(self, channels_in: int, channels_out: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = channels_in * expansion
        layers: list[nn.Module] = []
        if expansion != 1:
            layers += [*conv_norm(channels_in, hidden, 1), nn.ReLU6()]
        layers += [*conv_norm(hidden, hidden, 3, stride, groups=hidden), nn.ReLU6()]
        layers += conv_norm(hidden, channels_out, 1)
        self.layers = nn.Sequential(*layers)
        self.adds_input = stride == 1 and channels_in == channels_out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's features for ``x`` of shape ``[N, channels_in, H, W]``."""
        y: torch.Tensor = self.layers(x)
        return x + y if self.adds_input else y


class MobileNetV2(nn.Module):
    """MobileNet-V2 of width 1 for ``classes`` classes."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = [*conv_norm(3, 32, 3, stride=2), nn.ReLU6()]
        channels = 32
        for expansion, width, repeats, first_stride in STAGES:
            for position in range(repeats):
                stride = first_stride if position == 0 else 1
                layers.append(InvertedResidual(channels, width, stride, expansion))
                channels = width
        layers += [*conv_norm(channels, 1280, 1), nn.ReLU6()]
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, classes))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits of shape ``[N, classes]`` for ``images`` of shape ``[N, 3, H, W]``."""
        pooled = self.features(images).mean([2, 3])
        logits: torch.Tensor = self.classifier(pooled)
        return logits


def example() -> tuple[nn.Module, tuple[torch.Tensor]]:
    """Return the model with seeded weights and statistics, and one seeded image."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model = MobileNetV2()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                # Small random weights shrink the signal; small variances bring it back to about 1.
                nn.init.normal_(module.running_mean, std=0.02)
                nn.init.uniform_(module.running_var, 0.1, 0.3)
        return model.eval(), (torch.randn(1, 3, 224, 224),)
