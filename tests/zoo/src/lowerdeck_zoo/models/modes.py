"""Regions of autocast and of no gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lowerdeck_zoo.program import Program, normal


class Regions(nn.Module):
    """Regions in regions, operators that autocast does not name, state, control flow."""

    mean: torch.Tensor

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.wide, self.narrow = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm, self.conv = nn.LayerNorm(8), nn.Conv1d(4, 4, 3, padding=1)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.norm(x)
        with torch.autocast("cpu", dtype=self.dtype):
            h = self.narrow(nn.functional.gelu(self.wide(y)))
            attended = nn.functional.scaled_dot_product_attention(h, h, h)
            with torch.autocast("cpu", enabled=False):
                z = self.wide(y).softmax(-1)
            scores = torch.einsum("bij,bkj->bik", h, h).softmax(-1)
            near = nn.functional.cosine_similarity(h, attended)
            convolved = nn.functional.silu(self.conv(h))
        self.mean.add_(h.float().mean((0, 1)))
        either = torch.cond(h.float().sum() > 0, torch.sin, torch.cos, (convolved,))
        return x + h.float(), scores, near, either, self.narrow(z) + attended.float()


class Layers(nn.Module):
    """Modes in modes: off, on, off again inside, and no gradients."""

    def __init__(self, *, on: bool) -> None:
        super().__init__()
        self.on = on
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
            y = self.first(x).relu()
            with torch.no_grad():
                z = self.second(y) + x
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.on):
            z = self.second(z)
            with torch.autocast("cpu", enabled=False):
                y = self.first(y) + z.float()
        return self.second(y)


PROGRAMS = (
    *(
        Program(
            f"autocast_{str(dtype).removeprefix('torch.')}",
            lambda dtype=dtype: Regions(dtype),
            normal(2, 4, 8),
            tags="control-flow half in-place shared-weights stateful",
            atol=3e-2,
            rtol=3e-2,
        )
        for dtype in (torch.bfloat16, torch.float16)
    ),
    Program("autocast_off", lambda: Layers(on=False), normal(3, 8), tags="shared-weights"),
    Program(
        "autocast_on_and_off",
        lambda: Layers(on=True),
        normal(3, 8),
        atol=3e-2,
        rtol=3e-2,
        tags="half shared-weights",
    ),
)
