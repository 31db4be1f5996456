"""Modules that compute without gradients, with them or under autocast, as their callers or not."""

from __future__ import annotations

import torch
from torch import nn

from unflatten_zoo.case import Case


class Between(nn.Module):
    """Modules that compute in two regions and in none."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.a(x).relu()
        with torch.no_grad():
            scale = self.b(y).mean()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = self.a(y)
        return self.b(y) * scale + z


class SplitByMode(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Between()

    def forward(self, x):
        return self.block(self.block(x))


class SwitchesOn(nn.Module):
    """Computes with gradients, whatever its caller said: first, between or last."""

    def __init__(self, place):
        super().__init__()
        self.fc, self.place = nn.Linear(4, 4), place

    def forward(self, x):
        if self.place != "first":
            x = self.fc(x).sin()
        with torch.enable_grad():
            y = self.fc(x).relu()
        return y if self.place == "last" else y.relu() + x


class WithoutGradients(nn.Module):
    """Computes before, between and after two calls of one module, all without gradients."""

    def __init__(self, inner, deep=False):
        super().__init__()
        self.inner = WithoutGradients(inner) if deep else inner
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        x = self.fc(x)
        with torch.no_grad():
            y = self.inner(x.sigmoid()).tanh()
            y = self.inner(y)
        return self.fc(y) + x


class Precise(nn.Module):
    """Switches autocast off within its caller's."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        y = self.fc(x)
        with torch.autocast("cpu", enabled=False):
            z = self.fc(y.float())
        return self.fc(z)


class Autocasts(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.fc = Precise(), nn.Linear(4, 4)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.inner(x.sigmoid()).tanh()
            y = self.inner(y)
        return self.fc(y.float())


class Rotated(nn.Module):
    """Computes its factors without gradients and without autocast, and calls no module."""

    class Factors(nn.Module):
        @torch.no_grad()
        def forward(self, x):
            with torch.autocast("cpu", enabled=False):
                return x.float().sum(0).cos(), x.float().sum(0).sin()

    def __init__(self):
        super().__init__()
        self.factors, self.fc = self.Factors(), nn.Linear(4, 4)

    def forward(self, x):
        cos, sin = self.factors(x)
        return self.fc(x * cos + x.flip(0) * sin)


class Quiet(nn.Module):
    """Calls modules in regions of another mode, and one of them outside of any too."""

    def __init__(self):
        super().__init__()
        self.pair = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.kept, self.wide = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)), nn.Linear(4, 4)

    def forward(self, x):
        y = self.pair(x)
        with torch.no_grad():
            z = self.kept(self.pair[1](y + 1)) + 1
        with torch.autocast("cpu", dtype=torch.bfloat16):
            w = self.wide(z) * 2
        return y * z + w.float()


def X():  # noqa: N802
    return (torch.randn(2, 4),)


CASES = (
    Case("split by mode", SplitByMode, X),
    *(
        Case(
            f"switches on {place}",
            lambda place=place: WithoutGradients(SwitchesOn(place)),
            X,
            # Torch loads no region that returns its last value in another mode.
            without="saved, preserving saved" if place == "last" else "",
        )
        for place in ("first", "between", "last")
    ),
    Case("switches on deep", lambda: WithoutGradients(SwitchesOn("first"), deep=True), X),
    # Gradients in bfloat16 are summed in another order; torch decomposes no strict program of it.
    Case("autocasts", Autocasts, X, without="gradients, strict decomposed, alone"),
    Case("rotated", Rotated, X),
    # Its caller takes an item of a module, which a wrapper lacks.
    Case("quiet", Quiet, X, without="wrapping, strict decomposed"),
)
"""The cases of this module."""
