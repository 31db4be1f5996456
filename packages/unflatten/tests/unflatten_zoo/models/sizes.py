"""Sizes that vary, as arguments and as numbers that modules compute with."""

from __future__ import annotations

import torch
from torch import nn
from torch.export import Dim

from unflatten_zoo.case import Case


class Heads(nn.Module):
    """Splits by sizes of its argument, and makes a tensor of their product."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, x):
        batch, length, _ = x.shape
        split = self.project(x).view(batch, length, 2, 4).transpose(1, 2)
        return split.transpose(1, 2).flatten(2) + torch.arange(batch * length).sum()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads, self.more = Heads(), Heads()

    def forward(self, x):
        x = x + self.heads(x)
        return x + self.more(x)


class Blocks(nn.Module):
    """The first module computes sizes that all the others read."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x):
        y = self.second(self.first(x))
        return y, torch.ones(x.shape[0] * x.shape[1]), torch.ones(x.shape[0])


class Twice(nn.Module):
    """Modules whose arguments have other sizes than the model's."""

    class Counts(nn.Module):
        def forward(self, x):
            return torch.arange(x.shape[0] * x.shape[1] + 1) + x.sum()

    class Doubled(nn.Module):
        def forward(self, x):
            return x.view(x.shape[0] // 2, 2, -1).sum(1)

    def __init__(self):
        super().__init__()
        self.counts, self.doubled, self.again = self.Counts(), self.Doubled(), self.Counts()

    def forward(self, x):
        y = self.doubled(torch.cat([x, x]).flatten(1))
        return self.counts(x), y, self.again(x), torch.ones(x.shape[0] * x.shape[1])


class Last(nn.Module):
    """A size is first read in the last module, which is given another tensor of that size."""

    class Halves(nn.Module):
        def forward(self, x):
            return x.view(x.shape[0] * 2, -1).sum(1) + torch.arange(x.shape[0] * 2)

    def __init__(self):
        super().__init__()
        self.project, self.halves = nn.Linear(8, 8), self.Halves()

    def forward(self, x):
        y = x + self.project(x)
        return y, self.halves(y)


class Watched(nn.Module):
    """Computes with sizes of what its children return."""

    def __init__(self):
        super().__init__()
        self.many = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        for layer in self.many:
            y = layer(x[:, 1:])
            x = x + y.sum(1, keepdim=True) / y.shape[1]
        return x


class Lengthens(nn.Module):
    """Asks within a mode for a length that it makes there, and after it."""

    class Divides(nn.Module):
        def forward(self, x):
            return x.tanh() / x.shape[1]

    def __init__(self):
        super().__init__()
        self.divides, self.last = self.Divides(), self.Divides()

    def forward(self, x):
        with torch.no_grad():
            y = self.divides(torch.cat([x, x.relu() / x.shape[1]], 1))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = self.divides(y @ y.mT) @ y
        return self.last(z.float()) + x.sum(1, keepdim=True)


class Sized(nn.Module):
    """Gives a module a number that varies, which export cannot record."""

    class Makes(nn.Module):
        def forward(self, x, size):
            return x.sum((1, 2)) + torch.arange(size)

    def __init__(self):
        super().__init__()
        self.fc, self.sized = nn.Linear(8, 8), self.Makes()

    def forward(self, x):
        return self.sized(self.fc(x), x.shape[0])


class Shaped(nn.Module):
    """Gives a module a ``torch.Size``, as image encoders give theirs the size of an image."""

    class Views(nn.Module):
        def forward(self, x, shape):
            return x.relu().view(shape)

    def __init__(self):
        super().__init__()
        self.fc, self.views = nn.Linear(8, 8), self.Views()

    def forward(self, x):
        return self.views(self.fc(x).flatten(), x.shape)


class ReadsNumbers(nn.Module):
    """Two modules read one number out of a tensor, and one makes as many rows."""

    class Rows(nn.Module):
        def forward(self, x, count):
            rows = count.item()
            torch._check(rows >= 0)
            torch._check(rows <= 2)
            return x.narrow(0, 0, rows) * 2

    def __init__(self):
        super().__init__()
        self.first, self.second = self.Rows(), self.Rows()

    def forward(self, x, mask):
        count = mask.sum()
        return self.first(x, count), self.second(x + 1, count)


class DataDependent(nn.Module):
    """A size that depends on data, and a module that takes it."""

    class Inner(nn.Module):
        def forward(self, indices, number):
            return torch.ones(indices.shape[0], number) * number

    def __init__(self):
        super().__init__()
        self.fc, self.inner = nn.Linear(1, 1), self.Inner()

    def forward(self, x, count):
        indices = x.nonzero()
        torch._check(indices.shape[0] > 0)
        number = count.item()
        torch._check(number >= 0)
        torch._check(number <= 10)
        return self.fc(indices.float()), self.inner(indices, number), torch.zeros(number)


class AnyRows(nn.Module):
    """Takes any number of tensors, whose sizes vary."""

    class Joins(nn.Module):
        def forward(self, *parts, scale):
            return torch.cat(parts) * scale

    def __init__(self):
        super().__init__()
        self.joins, self.fc = self.Joins(), nn.Linear(4, 4)

    def forward(self, *parts):
        return self.fc(self.joins(*parts, scale=0.5))


class Resizes(nn.Module):
    """An image whose sides vary, halved and made as large again."""

    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4))
        self.up, self.last = nn.Upsample(scale_factor=2), nn.Conv2d(4, 2, 1)

    def forward(self, x):
        y = self.up(self.down(x).relu())
        return self.last(y[:, :, : x.shape[2], : x.shape[3]]) + x


class Shared(nn.Module):
    """One symbol is a size of two arguments and of what a module makes."""

    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x, y, mask):
            scores = self.q(x) @ self.k(y).mT
            return (scores + mask).softmax(-1) @ y

    def __init__(self):
        super().__init__()
        self.attends, self.norm = self.Attends(), nn.LayerNorm(4)

    def forward(self, x, y):
        mask = torch.zeros(x.shape[1], y.shape[1]).tril()
        return self.norm(self.attends(x, y, mask) + x)


def rows(count, length):
    return (torch.randn(count, length, 8),)


SIZES = ((3, 5), (2, 4), (7, 2))
BOTH = ({0: Dim("b", min=2, max=9), 1: Dim("t", min=2, max=9)},)
LONGER = ({0: Dim("b", min=2, max=9), 1: Dim("t", min=3, max=9)},)

CASES = (
    Case("blocks", Blocks, rows, SIZES, BOTH),
    Case("twice as many", Twice, rows, SIZES, BOTH),
    Case("asks last", Last, rows, ((3, 5), (2, 3), (7, 9)), BOTH),
    Case("watched", Watched, rows, ((3, 5), (2, 4)), LONGER),
    Case("lengthens", Lengthens, rows, SIZES, BOTH, tolerance=1e-2, without="strict decomposed"),
    Case("sized", Sized, rows, SIZES, BOTH, marked=("sized",)),
    Case("shaped", Shaped, lambda: (torch.randn(2, 8),)),
    Case(
        "reads numbers",
        ReadsNumbers,
        lambda count: (torch.randn(2, 8), torch.arange(2) < count),
        ((1,), (2,), (0,)),
    ),
    Case(
        "depends on data",
        DataDependent,
        lambda count: (torch.tensor([1, 0, count]), torch.tensor(count)),
        ((3,), (1,), (7,)),
        marked=("inner",),
    ),
    Case(
        "any rows",
        AnyRows,
        lambda one, other: (torch.randn(one, 4), torch.randn(other, 4)),
        ((3, 2), (2, 7)),
        (({0: Dim("one", max=16)}, {0: Dim("other", max=16)}),),
        # Its *args are separate parameters there, with dynamic shapes of their own.
        without="exported again",
    ),
    Case(
        "resizes",
        Resizes,
        lambda batch, side: (torch.randn(batch, 2, side, side),),
        ((2, 8), (3, 12)),
        ({0: Dim("b", min=2, max=9), 2: Dim.AUTO, 3: Dim.AUTO},),
    ),
    Case(
        "shares symbols",
        Shared,
        lambda batch, one, other: (torch.randn(batch, one, 4), torch.randn(batch, other, 4)),
        ((2, 3, 5), (4, 6, 2)),
        (
            {0: Dim("b", max=9), 1: Dim("t", max=9)},
            {0: Dim("b", max=9), 1: Dim("s", max=9)},
        ),
    ),
)
"""The cases of this module."""
