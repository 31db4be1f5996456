"""Layers of random models: with every kind of state, and of arguments and results."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._higher_order_ops.while_loop import while_loop
from torch.utils import _pytree as pytree

if TYPE_CHECKING:

    class Model(nn.Module):
        """A module whose attributes may be anything."""

        def __getattr__(self, name: str) -> Any: ...

else:
    Model = nn.Module

SIZE = 4

CONTROL_FLOW: list[int] = []
"""Grows by one with each choice and each loop that eager comes to."""


@dataclass
class Pair:
    """A result of a class of its own."""

    first: Tensor
    second: Any


pytree.register_dataclass(Pair, serialized_type_name="lowerdeck.tests.Pair")


class Leaf(Model):
    """A layer, now and then with state; takes a second tensor, a number, a flag and a size."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.kind = rng.choices(list(KINDS), [weight for weight, _ in KINDS.values()])[0]
        persistent = rng.random() < 0.6
        if self.kind == "linear":
            self.weight = nn.Parameter(torch.randn(SIZE, SIZE) / 2, rng.random() < 0.9)
            if rng.random() < 0.5:
                self.bias = nn.Parameter(torch.randn(SIZE))
        elif self.kind == "norm":
            self.norm = nn.LayerNorm(SIZE)
        elif self.kind == "batch":
            self.batch = nn.BatchNorm1d(SIZE)
        elif self.kind in {"count", "old", "row"}:
            self.register_buffer("state", torch.zeros(SIZE), persistent=persistent)
        elif self.kind == "steps":
            self.register_buffer(
                "state", torch.zeros((), dtype=torch.int64), persistent=persistent
            )
        elif self.kind == "view":
            self.register_buffer("whole", torch.randn(2 * SIZE), persistent=persistent)
            self.register_buffer("state", self.whole[2 : 2 + SIZE], persistent=persistent)
        elif self.kind == "mixed":
            for name, is_saved in (("first", False), ("state", True), ("last", persistent)):
                self.register_buffer(name, torch.randn(SIZE), persistent=is_saved)
        elif self.kind == "scale":
            self.factor = torch.full((SIZE,), 0.5)
        elif self.kind == "unused":
            self.register_buffer("state", torch.randn(SIZE), persistent=persistent)
            self.bias = nn.Parameter(torch.randn(SIZE))

    def forward(
        self,
        input: Tensor,  # noqa: A002
        type: Tensor | None = None,  # noqa: A002
        *,
        max: float = 1.0,  # noqa: A002
        flip: bool = False,
        id: Any = None,  # noqa: A002
    ) -> Any:
        x: Tensor = KINDS[self.kind][1](self, input)
        if type is not None:
            x = x + type
        if flip:
            x = -x
        if id is not None:
            x = x / id
        return x * max if max != 1.0 else x


def _linear(layer: Any, x: Tensor) -> Any:
    return nn.functional.linear(x, layer.weight, getattr(layer, "bias", None))


def _batch(layer: Any, x: Tensor) -> Any:
    return layer.batch(x)


def _norm(layer: Any, x: Tensor) -> Any:
    return layer.norm(x)


def _count(layer: Any, x: Tensor) -> Any:
    layer.state.add_(x.detach().mean(0))
    return x + layer.state


def _old(layer: Any, x: Tensor) -> Any:
    old = layer.state * 2
    layer.state.copy_(x.detach().sum(0) / 8)
    return x + old


def _row(layer: Any, x: Tensor) -> Any:
    layer.state[1] = x.detach().mean()
    layer.state[2:].mul_(0.5)
    return x + layer.state


def _steps(layer: Any, x: Tensor) -> Any:
    layer.state += 1
    return x * 0.9**layer.state


def _view(layer: Any, x: Tensor) -> Any:
    return x + layer.state * layer.whole[:SIZE]


def _mixed(layer: Any, x: Tensor) -> Any:
    return x * layer.last + layer.state - layer.first


def _scale(layer: Any, x: Tensor) -> Any:
    return x * layer.factor


def _dropout(layer: Any, x: Tensor) -> Any:
    return nn.functional.dropout(x, 0.5, layer.training)


def _unused(layer: Any, x: Tensor) -> Any:
    return x.clone()


def _nothing(layer: Any, x: Tensor) -> Any:
    return x


def _branch(layer: Any, x: Tensor) -> Any:
    return branch(x.sum() > 0, torch.sin, torch.cos, x)


def _loop(layer: Any, x: Tensor) -> Any:
    return loop(x)


KINDS: dict[str, tuple[float, Callable[[Any, Tensor], Any]]] = {
    "linear": (4, _linear),
    "norm": (2, _norm),
    "batch": (2, _batch),
    "count": (2, _count),
    "old": (2, _old),
    "row": (1, _row),
    "steps": (1, _steps),
    "view": (1, _view),
    "mixed": (0.7, _mixed),
    "scale": (1.5, _scale),
    "dropout": (1, _dropout),
    "unused": (0.7, _unused),
    "nothing": (0.7, _nothing),
    "branch": (0.25, _branch),
    "loop": (0.08, _loop),
}
"""How often each kind of layer occurs, and what it computes."""

WRITERS = frozenset({"count", "old", "row", "steps"})
"""The kinds of layers that write their state."""


def branch(
    pred: Tensor, left: Callable[[Tensor], Tensor], right: Callable[[Tensor], Tensor], x: Tensor
) -> Any:
    """Return what one of two functions makes of ``x``; export records the choice."""
    if torch.compiler.is_exporting():
        return torch.cond(pred, left, right, (x,))
    # torch.cond compiles itself where it is called by eager code, which takes a second.
    CONTROL_FLOW.append(1)
    return left(x) if pred else right(x)


def loop(x: Tensor) -> Any:
    """Return ``x`` after as many steps as its first number says; export records the loop."""

    def goes_on(step: Tensor, value: Tensor) -> Tensor:
        return step < 3

    def body(step: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return step + 1, value.sin() + 0.5

    step = (x.detach().sum() > 0).to(torch.int64)
    if torch.compiler.is_exporting():
        return while_loop(goes_on, body, (step, x.detach()))[1]  # type: ignore[no-untyped-call]
    CONTROL_FLOW.append(1)
    value = x.detach()
    while goes_on(step, value):
        step, value = body(step, value)
    return value
