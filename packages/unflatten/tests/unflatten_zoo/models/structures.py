"""Arguments and results: containers, classes, keywords, constants, one tensor given twice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import register_dataclass

from unflatten_zoo.case import Case, Named


@dataclass
class Pair:
    first: Tensor
    second: Any


register_dataclass(Pair, serialized_type_name="unflatten_zoo.Pair")
# Programs are saved with example inputs, which torch.load checks.
torch.serialization.add_safe_globals([Pair])


class Structures(nn.Module):
    """Takes a class and a dict by position and a tuple by name; returns a class and a dict."""

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, pair, options, flag=None):
            x = self.fc(pair.first) + options["bias"]
            return {"a": x, "b": (pair.second[0] + x, None if flag is None else 1)}

    def __init__(self):
        super().__init__()
        self.inner = self.Inner()

    def forward(self, pair, options, *, extra):
        result = self.inner(pair, options, flag=None)
        scale = extra[1] * extra[0]
        return Pair(result["a"] * scale, [result["b"][0]]), {"none": None, "list": [pair.first, 3]}


def structured():
    pair = Pair(torch.randn(2, 3), [torch.randn(2, 3)])
    options = {"bias": torch.randn(3), "unused": torch.ones(1)}
    return pair, options, Named(extra=(2, torch.rand(())))


class AnyArguments(nn.Module):
    class Sums(nn.Module):
        def forward(self, first, *rest, y, **more):
            return first + torch.stack(rest).sum(0) * y - more["z"]

    def __init__(self):
        super().__init__()
        self.inner = self.Sums()

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


class Builtins(nn.Module):
    """Arguments named as Python's builtins, called by name in another order."""

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, input, id, type, *, max):  # noqa: A002
            return self.fc(input) + id * type - max

    def __init__(self):
        super().__init__()
        self.inner = self.Inner()

    def forward(self, input, **kwargs):  # noqa: A002
        return self.inner(input, max=kwargs["max"], type=kwargs["type"], id=input)


class Optional(nn.Module):
    """Leaves optional arguments out, and gives None and constants for others."""

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x, mask=None, scale=1.0, *, flag=False):
            y = self.fc(x) * scale
            y = y if mask is None else y * mask
            return -y if flag else y

    def __init__(self):
        super().__init__()
        self.plain, self.named, self.masked = (self.Inner() for _ in range(3))

    def forward(self, x, mask=None):
        x = self.named(self.plain(x), mask, scale=0.5, flag=True)
        return self.masked(x, x.sigmoid(), 2.0)


class GivenTwice(nn.Module):
    """Gives one tensor twice, in containers too."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.work = nn.Linear(4, 4)

        def forward(self, q, k, d=None):
            more = d["a"].relu() - d["b"][1] * d["b"][0] if d else 0
            return self.work(q) * k + more

    def __init__(self, contained):
        super().__init__()
        self.child, self.contained = self.Two(), contained

    def forward(self, x):
        if self.contained:
            return self.child(x, x, d={"a": x, "b": (x.cos(), x)})
        return self.child(x.sin(), x).cos() + self.child(x, x)


class ReturnedTwice(nn.Module):
    """A result that is two results, and the argument itself."""

    class Results(nn.Module):
        def __init__(self):
            super().__init__()
            self.work = nn.Linear(4, 4)

        def forward(self, x):
            y = self.work(x)
            return y, [y, {"x": x}]

    def __init__(self):
        super().__init__()
        self.child = self.Results()

    def forward(self, x):
        one, (two, more) = self.child(x)
        return one + 1, two.relu(), more["x"] * 2


class PassesBias(nn.Module):
    """Layers that return an argument and their result, as those that share a bias."""

    class Biased(nn.Module):
        def __init__(self):
            super().__init__()
            self.work = nn.Linear(4, 4)

        def forward(self, x, bias):
            return self.work(x) + bias, {"bias": bias}

    def __init__(self):
        super().__init__()
        self.first, self.second = self.Biased(), self.Biased()

    def forward(self, x):
        x, more = self.first(x, x.sum(-1, keepdim=True))
        return self.second(x, more["bias"])[0]


class Identities(nn.Module):
    """Modules that return what they are given."""

    def __init__(self):
        super().__init__()
        self.drop, self.none = nn.Dropout(), nn.Identity()
        self.blocks = nn.Sequential(nn.Identity(), nn.Linear(4, 4), nn.Identity())

    def forward(self, x):
        return self.none(x) + self.blocks(self.drop(x))


class Drops(nn.Module):
    """Reads one of two results, which are two calls."""

    class Unread(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.lin = nn.Dropout(), nn.Linear(4, 4)

        def forward(self, x):
            return self.drop(x), x.float(), self.lin(self.drop(x)).contiguous()

    def __init__(self):
        super().__init__()
        self.inner, self.fc = self.Unread(), nn.Linear(4, 4)

    def forward(self, x):
        a, b, _ = self.inner(self.fc(x))
        d, _, f = self.inner(a.clone() + b.float())
        return d + f


class Texts(nn.Module):
    """Gives a text, which export cannot record."""

    class Kinds(nn.Module):
        def forward(self, x, kind):
            return x + 1 if kind == "more" else x - 1

    def __init__(self):
        super().__init__()
        self.fc, self.kinds = nn.Linear(4, 4), self.Kinds()

    def forward(self, x):
        return self.kinds(self.fc(x), "more")


class SeveralStructures(nn.Module):
    """Calls one module with arguments of two structures."""

    class Child(nn.Module):
        def __init__(self):
            super().__init__()
            self.work = nn.Linear(4, 4)

        def forward(self, x, more=None):
            return self.work(x).exp() if more is None else x - more.exp()

    def __init__(self):
        super().__init__()
        self.child = self.Child()

    def forward(self, x):
        return self.child(self.child(x), x)


class ReturnsState(nn.Module):
    """A module returns its parameter and its buffer, and the caller reads both ways."""

    class Position(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(4))
            self.register_buffer("n", torch.zeros(1))

        def forward(self, x):
            self.n.add_(1)
            return self.w, {"n": self.n}, x + 1

    def __init__(self, attribute):
        super().__init__()
        self.pos, self.attribute = self.Position(), attribute

    def forward(self, x):
        w, more, y = self.pos(x)
        return y * self.pos.w + self.pos.n if self.attribute else y * w + more["n"]


def randn(*shape):
    return lambda: (torch.randn(*shape),)


def tensors(count, *shape):
    return lambda: tuple(torch.randn(*shape) for _ in range(count))


CASES = (
    Case("structures", Structures, structured),
    Case(
        "any arguments",
        AnyArguments,
        lambda: (*tensors(3, 2, 4)(), Named(z=torch.randn(2, 4), y=torch.randn(2, 4))),
    ),
    Case(
        "named as builtins",
        Builtins,
        lambda: (torch.randn(1, 2), Named(type=torch.randn(2), max=torch.randn(2))),
    ),
    Case("optional arguments", Optional, randn(2, 4)),
    Case("given twice", lambda: GivenTwice(contained=False), randn(3, 4)),
    Case("given twice in containers", lambda: GivenTwice(contained=True), randn(3, 4)),
    Case("returned twice", ReturnedTwice, randn(3, 4)),
    Case("passes a bias", PassesBias, randn(3, 4)),
    Case("identities", Identities, randn(3, 4)),
    Case("drops results", Drops, randn(3, 4)),
    # Decomposing drops a dropout without readers, so that others draw other numbers.
    Case(
        "drops results in training",
        Drops,
        randn(3, 4),
        training=True,
        without="threads, decomposed",
    ),
    Case("texts", Texts, randn(3, 4), marked=("kinds",)),
    Case("several structures", SeveralStructures, randn(3, 4), marked=("child",)),
    # The program does not record whether the caller reads the result or the state of the module.
    *(
        Case(name, lambda of=of: ReturnsState(of), randn(3, 4), without="threads, changes")
        for name, of in (("returns state", False), ("returns and holds state", True))
    ),
)
"""The cases of this module."""
