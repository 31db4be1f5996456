"""Calls: several specializations, values besides arguments, hooks, branches."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from unflatten_zoo.case import Case


class Expert(nn.Module):
    """A constant chooses the child."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, use_a):
        return self.a(x) if use_a else self.b(x)


class Chooses(nn.Module):
    def __init__(self):
        super().__init__()
        self.expert = Expert()

    def forward(self, x):
        for use_a in (True, False, True, False):
            x = self.expert(x, use_a)
        return x


class Step(nn.Module):
    def __init__(self):
        super().__init__()
        self.work = nn.Linear(4, 4)

    def forward(self, x, t):
        if t > 0.2:
            x = torch.tanh(self.work(x))
        return x * t + 1


class Sampler(nn.Module):
    """One module with another constant each time, as diffusion models have it."""

    def __init__(self):
        super().__init__()
        self.step, self.other = Step(), Step()

    def forward(self, x):
        for t in (0.5, 0.25, 0.1):
            x = self.step(x, t)
        return self.other(self.other(x, 0.3), 0.1)


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.step = Step()

    def forward(self, x, t):
        return self.step(self.step(x, t) * t, 1 - t)


class Nested(nn.Module):
    """Specializations in specializations, of one name."""

    def __init__(self):
        super().__init__()
        self.step = Outer()

    def forward(self, x):
        for t in (0.5, 0.25, 0.9):
            x = self.step(x, t)
        return x


class Pyramid(nn.Module):
    """One module with arguments of several sizes."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return self.fc(x) / x.shape[0]

    def __init__(self):
        super().__init__()
        self.scaled, self.last = self.Scaled(), nn.Linear(4, 2)

    def forward(self, x):
        y = torch.cat([self.scaled(x), self.scaled(x[:2]), self.scaled(x[:1])])
        return self.last(y)


class CallsItself(nn.Module):
    """Calls itself with another constant."""

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x, left=3):
            return self.fc(x) if left == 0 else self(self.fc(x).relu(), left - 1) + x

    def __init__(self):
        super().__init__()
        self.inner = self.Inner()

    def forward(self, x):
        return self.inner(x)


class Borrows(nn.Module):
    """Calls a module that it does not hold; whose name its own begins."""

    def __init__(self, other):
        super().__init__()
        self.own, self.borrowed = nn.Linear(4, 4), [other]

    def forward(self, x):
        return self.borrowed[0](self.own(x))


class Lends(nn.Module):
    def __init__(self, calls):
        super().__init__()
        self.layer10, self.calls = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), calls
        self.layer1 = Borrows(self.layer10)

    def forward(self, x):
        return self.layer1(self.layer10(x) if self.calls else x)


STORE: dict[str, Any] = {}


class Makes(nn.Module):
    """Keeps a value that it does not return."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, *, key):
        y = self.fc(x) * key
        STORE["kept"] = y.sin()
        return y + 1


class Reads(nn.Module):
    """Reads that value, which it does not take as an argument."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, module):
        return self.fc(x) * STORE["kept"] + module


class KeepsValues(nn.Module):
    def __init__(self):
        super().__init__()
        self.makes, self.reads = Makes(), Reads()

    def forward(self, x):
        first = self.reads(self.makes(x, key=0.5), module=x)
        made = first + self.reads(self.makes(x, key=2.0), module=x.sin())
        STORE.clear()
        return made


class HandsOut(nn.Module):
    """Returns what a module computed within another one, as models of transformers do."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

        def forward(self, x):
            found = self.attention(x)
            STORE.setdefault("hidden", []).append(found)
            return x + torch.tanh(found)

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(2))

    def forward(self, x):
        STORE["hidden"] = []
        for layer in self.layers:
            x = layer(x)
        return x, tuple(STORE.pop("hidden"))


class OwnHooks(nn.Module):
    """Modules with hooks that were registered before the export."""

    class Scales(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))

        def forward(self, x, times=1.0):
            return x * self.weight * times

    def __init__(self):
        super().__init__()
        self.one, self.two, self.last = self.Scales(), self.Scales(), nn.Linear(4, 4)
        self.one.register_forward_pre_hook(halves)
        self.two.register_forward_pre_hook(more_times, with_kwargs=True)
        self.two.register_forward_hook(subtracts)

    def forward(self, x):
        y = self.two(self.one(x), times=x.sum())
        return self.last(self.two(y, times=y.sum())) + y


def halves(module, args):
    return args[0] * 0.5


def more_times(module, args, kwargs):
    return args, {"times": kwargs["times"] * 3}


def subtracts(module, args, result):
    return result - args[0]


def branch(condition, left, right, x):
    """Return what one of two functions computes; eager's torch.cond would compile itself."""
    if torch.compiler.is_exporting():
        return torch.cond(condition, left, right, (x,))
    return left(x) if condition else right(x)


class Branches(nn.Module):
    """Calls one module in a branch, one in a branch and outside, and one outside."""

    def __init__(self):
        super().__init__()
        self.inside, self.both, self.outside = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        y = self.outside(x)
        z = branch(x.sum() > 0, lambda x: -self.inside(x), lambda x: -self.both(x), y)
        return z + self.both(x)


class Vmapped(nn.Module):
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            rows = torch.vmap(lambda row: self.fc(row).cumsum(0) + row.sum())(x)
            return torch.vmap(torch.vmap(lambda value: value * 2))(rows)

    def __init__(self):
        super().__init__()
        self.before, self.inner, self.after = nn.Linear(4, 4), self.Inner(), nn.Linear(4, 4)

    def forward(self, x):
        return self.after(self.inner(self.before(x)))


def randn(*shape):
    return lambda: (torch.randn(*shape),)


X = randn(2, 4)

CASES = (
    Case("chooses", Chooses, X),
    Case("sampler", Sampler, X),
    Case("nested", Nested, X),
    Case("pyramid", Pyramid, randn(3, 4)),
    Case("calls itself", CallsItself, X, marked=("inner",)),
    Case("borrows", lambda: Lends(calls=False), X, marked=("layer10", "layer10.0", "layer10.1")),
    Case(
        "borrows and calls",
        lambda: Lends(calls=True),
        X,
        marked=("layer10", "layer10.0", "layer10.1"),
    ),
    # What is kept in a dict is shared by threads in eager, and dynamo does not see it.
    Case(
        "keeps values",
        KeepsValues,
        X,
        marked=("makes", "reads"),
        without="threads, strict, strict decomposed, hooks, wrapping",
    ),
    Case(
        "hands out",
        HandsOut,
        X,
        marked=("layers.0", "layers.1"),
        without="threads, strict, strict decomposed, changes",
    ),
    # Hooks that are added later see what the caller gives, not what the own hooks make of it.
    Case("own hooks", OwnHooks, X, without="hooks"),
    # torch.cond compiles itself.
    Case("branches", Branches, X, marked=("inside", "both"), without="threads"),
    # Torch refuses these, of a layer inside of vmap, which is given parts of a batch there.
    Case(
        "vmapped",
        Vmapped,
        randn(3, 4),
        without="strict, decomposed, alone, hooks, gradients, copies",
    ),
)
"""The cases of this module."""
