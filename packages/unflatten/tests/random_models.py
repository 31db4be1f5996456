"""Random trees of modules: shared, stateful, specialised, branching, in regions of other modes."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:

    class Model(nn.Module):
        """A module whose attributes may be anything."""

        def __getattr__(self, name: str) -> Any: ...

else:
    Model = nn.Module

SIZE = 4


class Leaf(Model):
    """A layer, now and then with state or with a second argument."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.kind = rng.choice(["linear", "norm", "batch", "count", "scale", "old", "dropout"])
        if self.kind == "linear":
            self.weight = nn.Parameter(torch.randn(SIZE, SIZE) / 2)
        elif self.kind == "norm":
            self.norm = nn.LayerNorm(SIZE)
        elif self.kind == "batch":
            self.batch = nn.BatchNorm1d(SIZE)
        elif self.kind in {"count", "old"}:
            self.register_buffer("state", torch.zeros(SIZE), persistent=rng.random() < 0.7)
        elif self.kind == "scale":
            self.factor = torch.full((SIZE,), 0.5)

    def forward(self, x: Tensor, extra: Tensor | None = None, *, gain: float = 1.0) -> Any:
        if self.kind == "linear":
            x = x @ self.weight
        elif self.kind == "norm":
            x = self.norm(x)
        elif self.kind == "batch":
            x = self.batch(x)
        elif self.kind == "count":
            self.state.add_(x.detach().mean(0))
            x = x + self.state
        elif self.kind == "old":
            old = self.state * 2
            self.state.copy_(x.detach().sum(0) / 8)
            x = x + old
        elif self.kind == "scale":
            x = x * self.factor
        if extra is not None:
            x = x + extra
        return x * gain if gain != 1.0 else x


class Tree(Model):
    """Calls its children by a random program, some of them more than once."""

    def __init__(self, rng: random.Random, depth: int, pool: list[nn.Module]) -> None:
        super().__init__()
        self.names: list[str] = []
        for number in range(rng.randint(1, 3)):
            if pool and rng.random() < 0.2:
                child = rng.choice(pool)
            elif depth > 0 and rng.random() < 0.6:
                child = Tree(rng, depth - 1, pool)
            else:
                child = Leaf(rng)
            pool.append(child)
            name = rng.choice(["layer1", "layer10", "fc", "graph", "block"]) + str(number)
            setattr(self, name, child)
            self.names.append(name)
        self.steps = [
            (rng.choice(self.names), rng.choices(_STEPS, _WEIGHTS)[0], rng.choice([1.0, 1.0, 0.5]))
            for _ in range(rng.randint(1, 4))
        ]

    def forward(self, x: Tensor, extra: Tensor | None = None, *, gain: float = 1.0) -> Any:
        for name, step, factor in self.steps:
            child: Any = getattr(self, name)
            if step == "plain":
                x = child(x)
            elif step == "extra":
                x = child(x, x.tanh())
            elif step == "gain":
                x = child(x, gain=factor)
            elif step == "residual":
                x = x + child(x)
            elif step == "no grad":
                with torch.no_grad():
                    y = child(x).sigmoid()
                x = x * y
            elif step == "cond":
                x = torch.cond(x.sum() > 0, _left, _right, (x,))
            elif step == "reads state":
                x = child(x)
                state = getattr(child, "state", None)
                if isinstance(state, Tensor):
                    x = x - state
        return x + extra if extra is not None else x


_STEPS = ("plain", "extra", "gain", "residual", "no grad", "reads state", "cond")
_WEIGHTS = (4, 2, 2, 2, 2, 2, 0.3)


def _left(x: Tensor) -> Tensor:
    return x.sin()


def _right(x: Tensor) -> Tensor:
    return x.cos()


def random_model(seed: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return a model and arguments for it."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model = Tree(rng, rng.randint(0, 3), [])
    return model.train(rng.random() < 0.5), (torch.randn(3, SIZE),)
