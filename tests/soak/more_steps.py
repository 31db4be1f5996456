"""Steps of random models that few users write, and that reviews of ``decompose`` found to matter.

Windows that overlap or leave elements out, operators of one's own that write (told so by keyword,
too), ``out=``, writes at masks, and writes in regions that are nested in others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("lowerdeck_soak::blend_", mutates_args=("written",))
def blend_(written: Tensor, other: Tensor) -> None:
    written.mul_(0.5).add_(other.sum() * 0.1)


@torch.library.custom_op("lowerdeck_soak::halve_", mutates_args=("written",))
def halve_(other: Tensor, written: Tensor, *, by: float = 2.0) -> Tensor:
    written.div_(by)
    return other.relu()


@halve_.register_fake
def _(other: Tensor, written: Tensor, *, by: float = 2.0) -> Tensor:
    return torch.empty_like(other)


def _change(change: Callable[..., Any]) -> Callable[..., None]:
    def step(*args: Any) -> None:
        change(*args)

    return step


def _written_inside(x: Tensor, y: Tensor) -> Tensor:
    """A branch that writes what it made, in a branch that does."""

    def inner(x: Tensor) -> Tensor:
        made = x.clone()
        made[0] = 0.5
        return made.transpose(0, -1).mul_(0.5).transpose(0, -1).clone()

    def outer(x: Tensor, y: Tensor) -> Tensor:
        made = x + y.mean()
        made.clamp_(-1, 1)
        return torch.cond(made.sum() > 0, inner, torch.sin, (made,))

    return torch.cond(y.sum() > 0, outer, lambda x, y: x - y.mean(), (x, y))


def _written_with_gradients(x: Tensor) -> Tensor:
    with torch.enable_grad():
        made = x.sin()
        made[..., 0].mul_(0.5)
        with torch.no_grad():
            made.add_(1)
    return made.detach()


VIEW_MORE: dict[str, Callable[..., Tensor]] = {
    "windows": lambda p, a: p[a].unfold(0, 2, 1),
    "windows_apart": lambda p, a: p[a].unfold(0, 2, 3),
    "pairs": lambda p, a: p[a].unfold(-1, 2, 2),
    "strided": lambda p, a: p[a].as_strided((2, 2), (1, 1)),
    "strided_apart": lambda p, a: p[a].as_strided((2, 2), (3, 1)),
}
WRITE_MORE: dict[str, Callable[..., Any]] = {
    "own_by_keyword": _change(lambda p, a: blend_(other=p[1], written=p[a])),
    "out": _change(lambda p, a: torch.add(p[a], 1, out=p[a])),
    "put_mask": _change(lambda p, a: p[a].index_put_((p[a] > 0,), p[1][0])),
    "add_mask": _change(lambda p, a: p[a].index_put_((p[a] > 0,), p[1][0], accumulate=True)),
    "own_in_part": _change(lambda p, a: blend_(p[a][0], p[1])),
    "with_gradients": lambda p, a: _written_with_gradients(p[a]),
}
WRITE_TWO_MORE: dict[str, Callable[..., Any]] = {
    "own": _change(lambda p, a, b: blend_(p[a], p[b])),
    "own_with_result": lambda p, a, b: halve_(p[b], written=p[a], by=4.0),
    "mul_out": _change(lambda p, a, b: torch.mul(p[b].expand_as(p[a]), 0.5, out=p[a])),
    "copy_mask": _change(lambda p, a, b: p[a].masked_scatter_(p[a] > 0, p[b])),
    "branch": lambda p, a, b: _written_inside(p[a], p[b]),
}
