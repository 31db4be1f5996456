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


class SwitchesOn(Model):
    """Computes with gradients first, whatever its caller said, and then as its caller does."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        with torch.enable_grad():
            y = self.fc(x)
        return y.relu()


class SwitchesOnLast(SwitchesOn):
    def forward(self, x: Tensor) -> Any:
        x = x.sin()
        with torch.enable_grad():
            return self.fc(x)


class SwitchesOnBetween(SwitchesOn):
    def forward(self, x: Tensor) -> Any:
        y = self.fc(x)
        with torch.enable_grad():
            z = self.fc(y).relu()
        return z + y


class CallsWithoutGradients(Model):
    """Computes before, between and after two calls of one module, all without gradients."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        x = self.fc(x)
        with torch.no_grad():
            y = self.inner(x.sigmoid()).tanh()
            y = self.inner(y)
        return self.fc(y) + x


class WithoutGradients(Model):
    """Calls a module that switches within one that does."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.outer = CallsWithoutGradients(inner)
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            y = self.outer(self.fc(x)).relu()
        return self.fc(y)
