"""State: written, shared, tied, unsaved, registered again."""

from __future__ import annotations

import torch
from torch import nn

from unflatten_zoo.case import Case


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count.add_(1)
        return x * self.count


class CountsThrice(nn.Module):
    """Calls a stateful module three times, and reads its state."""

    def __init__(self):
        super().__init__()
        self.counter, self.layer = Counter(), nn.Linear(2, 2)

    def forward(self, x):
        for _ in range(3):
            x = self.counter(x)
        return self.layer(x) + self.counter.count


class ReadsOldValue(nn.Module):
    """Reads a buffer before and after it writes it, as does its caller."""

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("state", torch.ones(3))

        def forward(self, x):
            new = self.state + x
            old = self.state * 2
            self.state.copy_(new)
            return old, self.state * 3

    def __init__(self):
        super().__init__()
        self.inner, self.after = self.Inner(), nn.Linear(3, 3)

    def forward(self, x):
        before = self.inner.state + 0
        old, new = self.inner(x)
        return self.after(before), old, new + self.inner.state


class Views(nn.Module):
    """Buffers that are views of one memory, as other types and conjugated."""

    def __init__(self):
        super().__init__()
        base = torch.arange(8.0)
        value = torch.randn(2, dtype=torch.complex64)
        held = {"base": base, "middle": base[2:6], "bits": base.view(torch.int32)}
        for name, tensor in {**held, "value": value, "conjugate": value.conj()}.items():
            self.register_buffer(name, tensor)

    def forward(self, x):
        return x + self.middle, self.base * 2, self.bits + 1, self.value * self.conjugate


class Overwrites(nn.Module):
    """Writes its argument, a result of a layer, and parts of its buffers."""

    def __init__(self):
        super().__init__()
        self.fc, self.relu = nn.Linear(4, 4), nn.ReLU(inplace=True)
        self.register_buffer("rows", torch.zeros(2, 4))
        self.register_buffer("number", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        y = self.relu(self.fc(x))
        y[:, 1].mul_(2)
        x[1] = 7
        self.rows[0] = y[1].detach()
        self.number += 1
        self.rows.view(-1)[3] = 9.0
        return y, self.rows.clone()


class Shared(nn.Module):
    """One module and parts of it under several names, called by some of them."""

    def __init__(self):
        super().__init__()
        self.a = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        self.b = nn.ModuleDict({"inner": self.a})
        self.c = nn.Sequential(self.a[0], nn.Linear(2, 2))

    def forward(self, x):
        return self.c(self.b["inner"](self.a(x)))


class SharedLayers(nn.Module):
    """Layers and activations of two names, of which the second is called."""

    def __init__(self):
        super().__init__()
        self.first, self.act, self.last = nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)
        self.again, self.same_act = self.first, self.act
        self.block = nn.Sequential(self.first, nn.Tanh())

    def forward(self, x):
        return self.last(self.same_act(self.again(self.block(x)))) + self.again(x)


class Chain(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x):
        return self.second(self.first(x))


def stateless_twice():
    """Return a module without state that has two names, in one that has two names itself."""
    act = nn.ReLU(inplace=True)
    inner = Chain(Chain(act, nn.Tanh()), Chain(nn.Tanh(), act))
    return nn.Sequential(OnePlus(), inner, inner)


class OnePlus(nn.Module):
    def forward(self, x):
        return x + 1


class Unsaved(nn.Module):
    """Buffers that are not saved, of which one is never read, and a plain tensor."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(2), persistent=False)
        self.register_buffer("unread", torch.zeros(2), persistent=False)
        self.factor = torch.full((2,), 0.5)

    def forward(self, x):
        self.seen.add_(1)
        return x * self.factor + self.seen


class Mixed(nn.Module):
    """Saved and unsaved buffers in turn."""

    def __init__(self):
        super().__init__()
        for number in range(4):
            self.register_buffer(f"b{number}", torch.ones(2) * number, persistent=number % 2 == 1)

    def forward(self, x):
        return x + self.b3 - self.b2 * self.b1 + self.b0


class TiedEmbedding(nn.Module):
    """As in T5: an embedding with a name that is never called, and a head with its weight."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Embedding(5, 3)
        self.encoder = nn.Module()
        self.encoder.embed = self.shared
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.shared.weight

    def forward(self, x):
        embedded = nn.functional.embedding(x, self.encoder.embed.weight)
        return self.head(self.encoder.embed(x) + embedded)


class TiedTables(nn.Module):
    """Three modules of one weight, of which one is never called and one has two names."""

    def __init__(self):
        super().__init__()
        self.shared, self.one, self.two = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.same = self.two
        self.one.weight = self.two.weight = self.shared.weight

    def forward(self, x):
        return self.one(x), self.two(x).sin(), self.same(x + 1)


class WritesTied(nn.Module):
    """The caller writes a buffer of two modules."""

    class Part(nn.Module):
        def __init__(self, n):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))
            self.register_buffer("n", n)

        def forward(self, x):
            return x * self.n + self.weight

    def __init__(self):
        super().__init__()
        self.one = self.Part(torch.ones(1))
        self.two = self.Part(self.one.n)

    def forward(self, x):
        self.two.n.add_(1)
        return self.two(self.one(x))


class NormsThrice(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x):
        for _ in range(3):
            x = self.norm(x).tanh()
        return x


class Rotary(nn.Module):
    """Registers a buffer again in each call, as rotary embeddings of transformers may."""

    class Turns(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("kept", torch.ones(4), persistent=False)
            self.register_buffer("used", torch.ones(4) * 2, persistent=False)

        def forward(self, x):
            self.register_buffer("used", self.kept * 2, persistent=False)
            return x * self.used

    def __init__(self):
        super().__init__()
        self.rotary, self.fc = self.Turns(), nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(self.rotary(x))


class Constants(nn.Module):
    """Calls a module that makes equal constants in each call, and writes into one."""

    class Makes(nn.Module):
        def forward(self, x):
            table = torch.zeros(2, 3)
            table[0, :] = torch.tensor([1.0, 2.0, float("nan")])
            with torch.no_grad():
                half = x + torch.tensor(0.5)
            one = torch.tensor(1.0)
            return x * torch.tensor(2j).abs() + table.nan_to_num() + half + one.add_(1)

    def __init__(self):
        super().__init__()
        self.makes, self.other = self.Makes(), self.Makes()

    def forward(self, x):
        return self.other(self.makes(self.makes(x)))


class Assigns(nn.Module):
    """Reads state of its parent, which the parent wrote before."""

    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.host = nn.Linear(2, 2), []

        def forward(self, x):
            return self.fc(x) + self.host[0].seen

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))
        self.reader = self.Reader()
        self.reader.host = [self]

    def forward(self, x):
        self.seen.copy_(x.sum(0))
        return self.reader(x) * 2


class Owner(nn.Module):
    def __init__(self):
        super().__init__()
        self.b = nn.Parameter(torch.full((4,), 2.0))
        self.register_buffer("c", torch.full((4,), 5.0))

    def forward(self, x):
        return x * self.b + self.c


class Collides(nn.Module):
    """State whose names torch.export, or our own code, gives to other values too."""

    def __init__(self):
        super().__init__()
        self.a, self.mul, self.torch, self._check = (
            Owner(),
            nn.Linear(4, 4),
            nn.Linear(4, 4),
            nn.Linear(4, 4),
        )
        for index, name in enumerate(("a_b", "p_a_b", "x", "add_1", "b_a_c", "_relu", "self_")):
            self.register_parameter(name, nn.Parameter(torch.full((4,), 1.0 + index)))
        for index, name in enumerate(("a_c", "_is_compiling", "_check_1", "mul_1", "value")):
            self.register_buffer(name, torch.full((4,), 2.0 + index))
        self.lifted = torch.full((4,), 0.5)

    def forward(self, x):
        y = self.torch(self.mul(self.a(x) * self.a_b + self.a_c) * self.p_a_b * self.x)
        y = y * self.add_1 + self.b_a_c * self._relu - self.self_ * torch.tensor(3.0)
        y = self._check(y * self._is_compiling + self._check_1 * self.mul_1) * self.value
        return y.relu() * self.lifted


def two_unsaved():
    model = Chain(Unsaved(), Unsaved())
    model.second.seen, model.second.factor = model.first.seen, model.first.factor
    return model


def twice(make):
    def made():
        layer = make()
        return Chain(layer, layer)

    return made


def randn(*shape):
    return lambda: (torch.randn(*shape),)


CASES = (
    Case("counts thrice", CountsThrice, randn(2, 2), without="threads"),
    Case("reads an old value", ReadsOldValue, randn(3), without="threads"),
    # torch.save takes no storage of two types.
    Case("views of one memory", Views, randn(4), without="files"),
    Case("overwrites", Overwrites, randn(2, 4), without="threads, changes, gradients"),
    Case("shared", Shared, randn(1, 2)),
    Case("shared layers", SharedLayers, randn(3, 4)),
    Case("stateless twice", stateless_twice, randn(3), without="changes"),
    Case("unsaved", Unsaved, randn(1, 2), without="threads"),
    # run_decompositions fails on a buffer that is written by two names.
    Case("unsaved and shared", twice(Unsaved), randn(1, 2), without="threads, decomposed"),
    Case("unsaved and tied", two_unsaved, randn(1, 2), without="threads, decomposed"),
    Case("saved and unsaved", Mixed, randn(1, 2)),
    # The program does not record which of the three has the weight that the caller reads.
    Case(
        "tied embedding",
        TiedEmbedding,
        lambda: (torch.randint(5, (2,)),),
    ),
    Case("tied tables", TiedTables, randn(2, 4)),
    # The program does not record by which of its names the caller writes the buffer.
    Case(
        "writes tied state",
        WritesTied,
        randn(3, 4),
        without="threads, decomposed, swaps",
    ),
    Case("norms thrice", NormsThrice, randn(3, 2), training=True, without="threads"),
    Case("rotary", Rotary, randn(2, 4)),
    Case("constants", Constants, randn(2, 3)),
    Case("collides", Collides, randn(2, 4)),
    Case("reads state of its parent", Assigns, randn(3, 2), without="threads"),
)
"""The cases of this module."""
