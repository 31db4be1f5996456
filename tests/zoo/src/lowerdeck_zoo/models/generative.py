"""Models that draw pictures."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812  (the name that everyone knows)
from torch import nn

from lowerdeck_zoo.program import Holding, Program, drawn, normal


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Conv2d(1, 4, 4, 2, 1), nn.SiLU(), nn.Conv2d(4, 8, 4, 2, 1))
        self.parts = nn.Linear(8 * 16, 2 * 6)
        self.start = nn.Linear(6, 8 * 16)
        self.decode = nn.Sequential(
            nn.ConvTranspose2d(8, 4, 4, 2, 1), nn.SiLU(), nn.ConvTranspose2d(4, 1, 4, 2, 1)
        )

    def forward(self, x: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, spread = self.parts(self.encode(x).flatten(1)).chunk(2, -1)
        z = mean + torch.exp(0.5 * spread) * noise
        picture = torch.sigmoid(self.decode(self.start(z).unflatten(1, (8, 4, 4))))
        distance = -0.5 * (1 + spread - mean.pow(2) - spread.exp()).sum(-1)
        return picture, distance


class TimeBlock(nn.Module):
    """A residual block that depends on the time step."""

    def __init__(self, inputs: int, outputs: int, time: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, inputs), nn.GroupNorm(4, outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time = nn.Linear(time, 2 * outputs)
        self.short = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        scale, shift = self.time(F.silu(time))[:, :, None, None].chunk(2, 1)
        y = self.conv2(F.silu(self.norm2(y) * (1 + scale) + shift))
        return y + self.short(x)


class Diffusion(nn.Module):
    """A small U-Net with a time embedding and attention at the bottom."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(width, 16), nn.SiLU(), nn.Linear(16, 16))
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down1, self.down2 = TimeBlock(width, width, 16), TimeBlock(width, 2 * width, 16)
        self.shrink = nn.Conv2d(width, width, 3, 2, 1)
        self.attention = nn.MultiheadAttention(2 * width, 2, batch_first=True)
        self.up = TimeBlock(3 * width, width, 16)
        self.out = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        rates = torch.exp(-math.log(10000) * torch.arange(4) / 4)
        angles = time[:, None].float() * rates
        told = self.time(torch.cat([angles.cos(), angles.sin()], -1))
        wide = self.down1(self.stem(x), told)
        low = self.down2(self.shrink(wide), told)
        rows = low.flatten(2).transpose(1, 2)
        rows = rows + self.attention(rows, rows, rows, need_weights=False)[0]
        low = rows.transpose(1, 2).view_as(low)
        y = self.up(torch.cat([F.interpolate(low, scale_factor=2.0), wide], 1), told)
        return self.out(y)


class Sampler(
    Holding, model=lambda: nn.Conv2d(3, 3, 3, padding=1), kept=lambda: torch.linspace(0.9, 0.3, 4)
):
    """Steps of denoising in a loop, with tables looked up by the step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def more(step: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
            return step < 4

        def once(step: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            kept = self.kept.index_select(0, step.view(1)).view(1, 1, 1, 1)
            noise = self.model(x)
            return step + 1, (x - (1 - kept).sqrt() * noise) / kept.sqrt()

        start = torch.zeros((), dtype=torch.int64)
        return torch.while_loop(more, once, (start, x))[1]


PROGRAMS = (
    Program("vae", VAE, drawn(lambda: (torch.randn(2, 1, 16, 16), torch.randn(2, 6)))),
    Program(
        "diffusion_step",
        Diffusion,
        lambda: [(torch.randn(2, 3, 8, 8), torch.tensor([i, 3 * i])) for i in (1, 5, 9)],
    ),
    Program("diffusion_loop", Sampler, normal(1, 3, 6, 6), tags="control-flow"),
)
