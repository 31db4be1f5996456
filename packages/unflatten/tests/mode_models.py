"""Models that run a part of themselves without gradients, with them or under autocast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:

    class Model(nn.Module):
        """A module whose attributes may be anything."""

        def __getattr__(self, name: str) -> Any: ...

else:
    Model = nn.Module


class SplitByMode(Model):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        y = self.a(x).relu()
        with torch.no_grad():
            scale = self.b(y).mean()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = self.a(y)
        return self.b(y) * scale + z


class SplitByModeTwice(Model):
    def __init__(self) -> None:
        super().__init__()
        self.block = SplitByMode()

    def forward(self, x: Tensor) -> Any:
        out: Tensor = self.block(self.block(x))
        return out
