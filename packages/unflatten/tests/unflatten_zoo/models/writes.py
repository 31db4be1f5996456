"""Arguments, results and buffers that are written in place, by modules or by their callers."""

from __future__ import annotations

import torch
from torch import nn

from unflatten_zoo.case import Case


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(x)


class Writes(nn.Module):
    """Writes what it gives to a module, or what that returned, or a buffer that it gives it."""

    def __init__(self, run):
        super().__init__()
        self.inner, self.run = Layer(), run
        self.register_buffer("state", torch.ones(2, 4))

    def forward(self, x):
        return self.run(self, x)


def argument(self, x):
    y = x + 1
    y[:, :2].mul_(2)
    y.view(-1).mul_(2)
    return self.inner(y)


def results(self, x):
    y = self.inner(x)
    y[:, :1].add_(1)
    y = self.inner(y)
    y.view(-1)[0] = 0.25
    return self.inner(y) + y


def an_input(self, x):
    x[:, :1].add_(1)
    return self.inner(x)


def a_buffer(self, x):
    self.state[:, :1].add_(x[:, :1])
    y = self.inner(self.state)
    self.state[:, :1].add_(x[:, :1])
    return self.inner(self.state) + y


def a_base(self, x):
    y = x + 1
    view = y[:2]
    before = view + 0
    y.mul_(2)
    return self.inner(view) + before


class WritesOwnResult(nn.Module):
    class Inner(Layer):
        def forward(self, x):
            y = self.fc(x)
            y[:, :2].mul_(2)
            return y

    def __init__(self):
        super().__init__()
        self.inner = self.Inner()

    def forward(self, x):
        return self.inner(self.inner(x).sin())


class InPlace(nn.Module):
    """Calls an activation that writes its argument, and reads one of the two or both."""

    def __init__(self, run, act=None):
        super().__init__()
        self.work, self.run = nn.Linear(4, 4), run
        self.act = nn.ReLU(inplace=True) if act is None else act

    def forward(self, x):
        return self.run(self, x)


def reads_result(self, x):
    y = self.act(self.work(x))
    return self.work(y) + y


def writes_result(self, x):
    y = self.act(self.work(x))
    y += 1
    return y, self.work(y)


def reads_both(self, x):
    y = self.work(x)
    return self.work(self.act(y)) + y


def reads_argument(self, x):
    y = self.work(x)
    self.act(y)
    return self.work(y)


def writes_argument(self, x):
    y = self.work(x)
    z = self.act(y)
    y *= 2
    return z


class Increases(nn.Module):
    """Writes its argument and returns something else."""

    def forward(self, x):
        x.add_(1)
        return x.sum(-1)


def reads_the_written(self, x):
    y = x * 2
    total = self.act(y)
    return total, self.work(y), y + 1


class ReturnsView(nn.Module):
    """Returns a part of its argument."""

    def forward(self, x):
        return x[1:]


def writes_the_base(self, x):
    y = self.work(x)
    view = self.act(y)
    before = view + 1
    y.add_(1)
    return before, view * 2


def randn(*shape):
    return lambda: (torch.randn(*shape),)


# In the place of what writes its argument, a module that changes its result alone has no meaning.
_WRITTEN = "changes"

CASES = (
    Case("writes an argument", lambda: Writes(argument), randn(2, 4)),
    Case("writes results", lambda: Writes(results), randn(2, 4)),
    Case("writes an input", lambda: Writes(an_input), randn(2, 4)),
    Case(
        "writes a given buffer",
        lambda: Writes(a_buffer),
        randn(2, 4),
        without="threads, gradients",
    ),
    Case("writes a base", lambda: Writes(a_base), randn(2, 4)),
    Case("writes its result", WritesOwnResult, randn(2, 4)),
    Case("in place, reads the result", lambda: InPlace(reads_result), randn(3, 4)),
    Case(
        "in place, writes the result",
        lambda: InPlace(writes_result),
        randn(3, 4),
        without="gradients",
    ),
    Case("in place, reads both", lambda: InPlace(reads_both), randn(3, 4), without=_WRITTEN),
    Case(
        "in place, reads the argument",
        lambda: InPlace(reads_argument),
        randn(3, 4),
        without=_WRITTEN,
    ),
    Case(
        "in place, writes the argument",
        lambda: InPlace(writes_argument),
        randn(3, 4),
        without="changes, gradients",
    ),
    Case("increases", lambda: InPlace(reads_the_written, Increases()), randn(3, 4)),
    Case(
        "views of what is written",
        lambda: InPlace(writes_the_base, ReturnsView()),
        randn(3, 4),
        without=_WRITTEN,
    ),
)
"""The cases of this module."""
