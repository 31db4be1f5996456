"""Convolutional networks and a vision transformer, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  (the name that everyone knows)
from torch import nn

from lowerdeck_zoo.program import Program, normal


def _conv(inputs: int, outputs: int, size: int = 3, stride: int = 1, groups: int = 1) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU6(),
    )


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.short = nn.Conv2d(inputs, outputs, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.first(x)))
        return F.relu(self.norm2(self.second(y)) + self.short(x))


class ResNet(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Sequential(_conv(3, width, 7, 2), nn.MaxPool2d(3, 2, 1))
        self.stages = nn.Sequential(
            Residual(width, width, 1),
            Residual(width, 2 * width, 2),
            Residual(2 * width, 4 * width, 2),
        )
        self.head = nn.Linear(4 * width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.stages(self.stem(x)).mean((2, 3)))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, 2, 1)
        self.middle = nn.Conv2d(8, 8, 3, dilation=2, padding=2)
        self.up = nn.ConvTranspose2d(8, 8, 2, 2)
        self.out = nn.Conv2d(11, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = F.silu(self.middle(F.silu(self.down(x))))
        wide = F.interpolate(self.up(low), scale_factor=2, mode="bilinear", align_corners=False)
        narrow = F.interpolate(wide, size=x.shape[2:], mode="nearest")
        return torch.sigmoid(self.out(torch.cat([narrow, x], 1)))


class ViT(nn.Module):
    def __init__(self, width: int = 32, depth: int = 2) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 8, 8)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.place = nn.Parameter(torch.randn(1, 17, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = self.patch(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(x.shape[0], -1, -1), patches], 1) + self.place
        return self.head(self.encoder(tokens)[:, 0])


class Conv1dNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(4, 8, 5, padding=2),
            nn.GroupNorm(2, 8),
            nn.GELU(),
            nn.ConvTranspose1d(8, 4, 4, 2, 1),
            nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
            nn.LeakyReLU(0.1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class PixelNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 12, 3, padding=1, padding_mode="reflect")
        self.shuffle = nn.PixelShuffle(2)
        self.slope = nn.PReLU(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.slope(self.shuffle(self.conv(x)))
        y = F.pad(y, (1, 2, 0, 1), value=0.5)
        return F.max_pool2d(y, 2, ceil_mode=True) - F.adaptive_avg_pool2d(y, (17, 18))


PROGRAMS = (
    Program("resnet", ResNet, normal(1, 3, 64, 64)),
    Program("unet", UNet, normal(1, 3, 32, 32)),
    Program("vit", ViT, normal(1, 3, 32, 32)),
    Program("conv1d", Conv1dNet, normal(2, 4, 20)),
    Program("pixel_shuffle_reflect_pad", PixelNet, normal(1, 3, 16, 16)),
)
