"""Random trees of modules that read sizes of their arguments, two of which vary on their own."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

SHAPES = ((4, 12, 8), (5, 16, 8), (7, 13, 8), (6, 9, 8))

TRANSFORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "x": lambda x: x + 1,
    "t-1": lambda x: x[:, 1:],
    "b-1": lambda x: x[1:],
    "(t+1)//2": lambda x: x[:, ::2],
    "t//2+1": lambda x: x[:, : x.shape[1] // 2 + 1],
    "b*t": lambda x: x.reshape(1, -1, 8),
    "b*t rows": lambda x: x.reshape(-1, 2, 4).repeat(1, 1, 2),
    "2*t": lambda x: torch.cat([x, x], 1),
    "3*b": lambda x: torch.cat([x, x, x]),
    "t, b": lambda x: x.transpose(0, 1),
    "b+t": lambda x: torch.cat([x[:1], x[:, :1].transpose(0, 1)], 1),
    "t + t%3": lambda x: torch.cat([x, x[:, : x.shape[1] % 3]], 1),
    "t*t": lambda x: (x[:1, :, None] * x[:1, None]).flatten(1, 2),
    "b*(t-1)": lambda x: x[:, 1:].flatten(0, 1)[:, None],
}
"""What is given to a module, by its sizes."""

READS: dict[str, Callable[[int, int], float]] = {
    "t": lambda _, t: t,
    "b": lambda b, _: b,
    "b*t": lambda b, t: b * t,
    "2*b*t + 1": lambda b, t: 2 * b * t + 1,
    "t//2 + 1": lambda _, t: t // 2 + 1,
    "b + t": lambda b, t: b + t,
    "(t-1)*b + 1": lambda b, t: (t - 1) * b + 1,
    "t%3 + 1": lambda _, t: t % 3 + 1,
    "t*t": lambda _, t: t * t,
    "t/2": lambda _, t: t / 2,
}
"""The numbers that a module reads of the sizes of its argument."""


class Leaf(nn.Module):
    """Returns one number, which depends on sizes; takes one tensor or two."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.reads = [rng.choice(list(READS.values())) for _ in range(rng.randint(1, 3))]
        self.project = nn.Linear(8, 8) if rng.random() < 0.3 else None

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        x = x if self.project is None else self.project(x)
        total = x.sum()
        for read in self.reads:
            total = total / read(x.shape[0], x.shape[1]) + x.mean()
        if y is not None:
            total = total + y.sum() / (y.shape[0] + y.shape[1])
        return total + torch.arange(x.shape[1]).sum() / 50


class Tree(nn.Module):
    """Gives its children parts and multiples of its argument."""

    def __init__(self, rng: random.Random, depth: int) -> None:
        super().__init__()
        self.children_ = nn.ModuleList(
            Tree(rng, depth - 1) if depth and rng.random() < 0.5 else Leaf(rng)
            for _ in range(rng.randint(1, 3))
        )
        self.transforms = [rng.choice(list(TRANSFORMS.values())) for _ in self.children_]
        self.twos = [isinstance(one, Leaf) and rng.random() < 0.25 for one in self.children_]
        self.reads = rng.choice(list(READS.values())) if rng.random() < 0.5 else None

    def forward(self, x: Tensor) -> Tensor:
        total = x.mean()
        for child, transform, takes_two in zip(
            self.children_, self.transforms, self.twos, strict=True
        ):
            given = transform(x)
            total = total + (child(given, x * 2) if takes_two else child(given)).tanh()
        return total if self.reads is None else total / self.reads(x.shape[0], x.shape[1])


class Whole(nn.Module):
    """A tree that is given what another module computes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.before, self.tree = nn.Linear(8, 8), Tree(random.Random(seed), 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.tree(self.before(x))
        return y


class Shorter(nn.Module):
    """Gives what it holds another size than it is given."""

    def __init__(self, inner: nn.Module, dim: int) -> None:
        super().__init__()
        self.inner, self.dim = inner, dim

    def forward(self, x: Tensor, *others: Tensor) -> Any:
        return self.inner(_shorter(x, self.dim), *others)


def _shorter(x: Tensor, dim: int) -> Tensor:
    return x.narrow(dim, 0, (x.shape[dim] + 1) // 2)


def changes(path: str, eager: nn.Module) -> Iterator[tuple[str, Callable[[Any], None]]]:
    """Yield what can be done to one module of a model, or of an unflattened one, by name."""
    yield (
        "swap",
        lambda model: model.set_submodule(path, copy.deepcopy(eager.get_submodule(path))),
    )
    for dim in (0, 1):

        def wrap(model: Any, dim: int = dim) -> None:
            model.set_submodule(path, Shorter(model.get_submodule(path), dim))

        def hook(model: Any, dim: int = dim) -> None:
            model.get_submodule(path).register_forward_pre_hook(
                lambda _, args: (_shorter(args[0], dim), *args[1:])
            )

        yield f"wrap {dim}", wrap
        yield f"hook {dim}", hook
