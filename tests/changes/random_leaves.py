"""Layers of random models: with every kind of state, and of arguments and results."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._higher_order_ops.while_loop import while_loop
from torch.utils import _pytree as pytree

SIZE = 4

CONTROL_FLOW: list[int] = []
"""Grows by one with each choice and each loop that eager comes to."""


@dataclass
class Pair:
    """A result of an own class."""

    first: Tensor
    second: Any


pytree.register_dataclass(Pair, serialized_type_name="lowerdeck.tests.Pair")


class Leaf(nn.Module):
    """A layer, now and then with state; takes a second tensor, a number, a flag and a size."""

    def __init__(self, rng: random.Random, *, odd: bool = False) -> None:
        super().__init__()
        kinds = ALL_KINDS if odd else KINDS
        self.kind = rng.choices(list(kinds), [weight for weight, _ in kinds.values()])[0]
        persistent = rng.random() < 0.6
        if self.kind == "linear":
            self.weight = nn.Parameter(torch.randn(SIZE, SIZE) / 2, rng.random() < 0.9)
            if rng.random() < 0.5:
                self.bias = nn.Parameter(torch.randn(SIZE))
        elif self.kind == "norm":
            self.norm = nn.LayerNorm(SIZE)
        elif self.kind == "batch":
            self.batch = nn.BatchNorm1d(SIZE)
        elif self.kind in {"count", "old", "row", "shows"}:
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
        elif self.kind == "own hook":
            self.register_forward_hook(_doubled)
        elif self.kind == "own hook before":
            self.register_forward_pre_hook(_halved)

    def __getstate__(self) -> dict[str, Any]:
        # What is kept for the rest of a call is in no copy: some tensors have none.
        return {name: value for name, value in vars(self).items() if name != "kept"}

    def forward(
        self,
        input: Tensor,  # noqa: A002
        type: Tensor | None = None,  # noqa: A002
        *,
        max: float = 1.0,  # noqa: A002
        flip: bool = False,
        id: Any = None,  # noqa: A002
    ) -> Any:
        x: Tensor = ALL_KINDS[self.kind][1](self, input)
        if type is not None:
            x = x + type
        if flip:
            x = -x
        if id is not None:
            x = x / id
        x = x * max if max != 1.0 else x
        return (x, None, [self.state]) if self.kind == "shows" else x


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


def _unused(layer: Any, x: Tensor) -> Any:
    return x.clone()


KINDS: dict[str, tuple[float, Callable[[Any, Tensor], Any]]] = {
    "linear": (
        4,
        lambda layer, x: nn.functional.linear(x, layer.weight, getattr(layer, "bias", None)),
    ),
    "norm": (2, lambda layer, x: layer.norm(x)),
    "batch": (2, lambda layer, x: layer.batch(x)),
    "count": (2, _count),
    "old": (2, _old),
    "row": (1, _row),
    "steps": (1, _steps),
    "view": (1, lambda layer, x: x + layer.state * layer.whole[:SIZE]),
    "mixed": (0.7, lambda layer, x: x * layer.last + layer.state - layer.first),
    "scale": (1.5, lambda layer, x: x * layer.factor),
    "dropout": (1, lambda layer, x: nn.functional.dropout(x, 0.5, layer.training)),
    "unused": (0.7, _unused),
    "nothing": (0.7, lambda layer, x: x),
    "branch": (0.25, lambda layer, x: branch(x.sum() > 0, torch.sin, torch.cos, x)),
    "loop": (0.08, lambda layer, x: loop(x)),
}
"""How often each kind of layer occurs, and what it computes."""


def _doubled(layer: Any, args: Any, result: Tensor) -> Tensor:
    return result * 2


def _halved(layer: Any, args: Any) -> Any:
    return (args[0] * 0.5, *args[1:]) if args else None


def _writes(layer: Any, x: Tensor) -> Any:
    x.mul_(0.5)
    return x.sin()


def _writes_by_view(layer: Any, x: Tensor) -> Any:
    x[:, 1:3].add_(0.25)
    return x * 2


def _keeps(layer: Any, x: Tensor) -> Any:
    layer.kept = x.sin()
    return x + 1


def _keeps_given(layer: Any, x: Tensor) -> Any:
    layer.kept = x
    return x.cos()


def _frozen(layer: Any, x: Tensor) -> Any:
    with torch.no_grad():
        scale = x.sigmoid()
    return x * scale


def _rounds(layer: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        product = x @ x.mT
    return x + product.float().softmax(-1) @ x


ODD_KINDS: dict[str, tuple[float, Callable[[Any, Tensor], Any]]] = {
    "writes": (1, _writes),
    "writes by view": (1, _writes_by_view),
    "gives back": (1, lambda layer, x: x.add_(0.25)),
    "gives view": (0.7, lambda layer, x: x.view(-1).view(x.shape)),
    "gives same": (0.7, lambda layer, x: x.to(torch.float32)),
    "shows": (1.5, _count),
    "keeps": (1.5, _keeps),
    "keeps given": (1, _keeps_given),
    "frozen": (1, _frozen),
    "rounds": (0.7, _rounds),
    "own hook": (0.7, _unused),
    "own hook before": (0.7, _unused),
}
"""Layers that write or give back what they are given, return state, and keep what others read."""

ALL_KINDS = {**KINDS, **ODD_KINDS}

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
