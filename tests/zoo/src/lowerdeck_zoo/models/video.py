"""Models of moving pictures and volumes."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  (the name that everyone knows)
from torch import nn

from lowerdeck_zoo.program import Holding, Program, drawn, normal


class Residual3d(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv3d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm3d(outputs),
            nn.ReLU(),
            nn.Conv3d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm3d(outputs),
        )
        self.short = nn.Conv3d(inputs, outputs, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.short(x))


class R3D(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv3d(3, 8, (3, 7, 7), (1, 2, 2), (1, 3, 3))
        self.stages = nn.Sequential(Residual3d(8, 8, 1), Residual3d(8, 16, 2))
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.stages(F.relu(self.stem(x)))
        return self.head(F.adaptive_avg_pool3d(y, 1).flatten(1))


class R2Plus1D(nn.Module):
    """Space and time by turns; pools over both."""

    def __init__(self) -> None:
        super().__init__()
        self.space = nn.Conv3d(3, 8, (1, 3, 3), padding=(0, 1, 1))
        self.time = nn.Conv3d(8, 8, (3, 1, 1), padding=(1, 0, 0), groups=2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.time(F.relu(self.space(x)))
        return F.max_pool3d(y, (2, 3, 3), (2, 2, 2), (0, 1, 1)), F.avg_pool3d(y, 2)


class UNet3D(nn.Module):
    """Down and up again in three dimensions, for images of bodies."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv3d(1, 4, 3, 2, 1)
        self.norm = nn.InstanceNorm3d(4)
        self.up = nn.ConvTranspose3d(4, 4, 2, 2)
        self.out = nn.Conv3d(5, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = F.leaky_relu(self.norm(self.down(x)))
        wide = self.up(low) + F.interpolate(low, size=x.shape[2:], mode="trilinear")
        return self.out(torch.cat([wide, x], 1)).softmax(1)


class VoxelMorph(Holding, field=lambda: nn.Conv3d(2, 3, 3, padding=1)):
    """Bends a volume by a field of displacements."""

    def forward(self, moving: torch.Tensor, fixed: torch.Tensor) -> torch.Tensor:
        field = self.field(torch.cat([moving, fixed], 1)).permute(0, 2, 3, 4, 1) * 0.1
        axes = [torch.linspace(-1, 1, size) for size in moving.shape[2:]]
        grid = torch.stack(torch.meshgrid(*axes, indexing="ij")[::-1], -1)
        return F.grid_sample(moving, grid + field, align_corners=True)


PROGRAMS = (
    Program("r3d", R3D, normal(1, 3, 4, 16, 16)),
    Program("r2plus1d", R2Plus1D, normal(1, 3, 4, 12, 12)),
    Program("unet_3d", UNet3D, normal(1, 1, 6, 8, 8)),
    Program(
        "voxelmorph",
        VoxelMorph,
        drawn(lambda: (torch.randn(1, 1, 4, 5, 6), torch.randn(1, 1, 4, 5, 6))),
    ),
    Program(
        "volume_convolution",
        lambda: nn.Conv3d(4, 6, (3, 2, 3), (1, 2, 1), (1, 0, 1), (2, 1, 1), groups=2),
        normal(2, 4, 5, 6, 4),
    ),
    Program(
        "volume_transposed",
        lambda: nn.ConvTranspose3d(4, 6, 3, (2, 1, 2), 1, (1, 0, 1), groups=2),
        normal(2, 4, 5, 6, 4),
    ),
    Program(
        "volume_largest",
        lambda: nn.MaxPool3d((2, 3, 1), (2, 1, 1), (1, 1, 0)),
        normal(2, 4, 5, 6, 4),
    ),
    Program(
        "volume_average",
        lambda: nn.AvgPool3d(3, 2, 1, ceil_mode=True, count_include_pad=False),
        normal(2, 4, 5, 6, 4),
    ),
    Program("volume_adaptive", lambda: nn.AdaptiveAvgPool3d((2, 3, 1)), normal(2, 4, 5, 6, 4)),
    Program("volume_norm", lambda: nn.BatchNorm3d(4), normal(2, 4, 5, 6, 4)),
    Program("volume_group_norm", lambda: nn.GroupNorm(2, 4), normal(2, 4, 5, 6, 4)),
    Program(
        "volume_upsample",
        lambda: nn.Upsample(scale_factor=2, mode="trilinear"),
        normal(2, 4, 5, 6, 4),
    ),
)
