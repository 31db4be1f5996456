"""Models of moving pictures and volumes."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  (the name that everyone knows)
from torch import nn

from lowerdeck_zoo.program import Holding, Program, drawn, normal


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
