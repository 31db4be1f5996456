"""Lists, dicts and caches that modules are given or return, and that some of them change."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils import _pytree as pytree

from unflatten_zoo.case import Case


class Cache:
    """An object that grows, and that pytree knows, as the caches of transformers."""

    def __init__(self, values):
        self.values = values

    def add(self, value):
        self.values.append(value)
        return torch.cat(self.values)


pytree.register_pytree_node(
    Cache,
    lambda cache: (cache.values, None),
    lambda values, _: Cache(list(values)),
    serialized_type_name="unflatten_zoo.Cache",
)


class ReadsContainers(nn.Module):
    """Gives a module a dict that it reads and whose tensor it writes."""

    class Reads(nn.Module):
        def forward(self, x, held):
            held["x"][0].add_(1)
            return x + held["x"][0] + len(held)

    def __init__(self):
        super().__init__()
        self.reads = self.Reads()

    def forward(self, x):
        held = {"x": [x * 2]}
        return self.reads(x, held) + held["x"][0]


class FillsContainers(nn.Module):
    """Gives two modules one container, which they change."""

    class Fills(nn.Module):
        def __init__(self, change):
            super().__init__()
            self.work, self.change = nn.Linear(4, 4), change

        def forward(self, x, held):
            self.change(held, self.work(x))
            return x + sum(leaf.sum(0) for leaf in pytree.tree_leaves(held))

    def __init__(self, change, make):
        super().__init__()
        self.first, self.second, self.make = self.Fills(change), self.Fills(change), make

    def forward(self, x):
        held = self.make(x)
        y = self.second(self.first(x, held), held=held)
        return y, held


def sets_key(held, value):
    held["x"] = held["x"] * value
    held["y"] = value


class ReturnsContainer(nn.Module):
    """Changes a list that a module returned as it was given."""

    class Same(nn.Module):
        def __init__(self):
            super().__init__()
            self.work = nn.Linear(4, 4)

        def forward(self, x, held):
            return self.work(x), held

    def __init__(self):
        super().__init__()
        self.child = self.Same()

    def forward(self, x):
        held = [x]
        y, again = self.child(x, held)
        again.append(y)
        return y + sum(held)


def randn(*shape):
    return lambda: (torch.randn(*shape),)


CASES = (
    Case("reads containers", ReadsContainers, randn(3, 4)),
    Case(
        "fills a list",
        lambda: FillsContainers(lambda held, value: held.append(value), lambda x: [x]),
        randn(3, 4),
        marked=("first", "second"),
    ),
    Case(
        "fills a dict",
        lambda: FillsContainers(sets_key, lambda x: {"x": x}),
        randn(3, 4),
        marked=("first", "second"),
    ),
    Case(
        "fills a cache",
        lambda: FillsContainers(lambda held, value: held.add(value), lambda x: Cache([x])),
        randn(3, 4),
        marked=("first", "second"),
    ),
    Case("returns a container", ReturnsContainer, randn(3, 4), marked=("child",)),
)
"""The cases of this module."""
