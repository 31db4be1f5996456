"""Models in other types than float32, and mixes of types."""

from __future__ import annotations

import torch
from torch import nn

from lowerdeck_zoo.program import Of, Program, drawn, normal


def _integers(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x + y, x // 3, x % 4, -x % 5, (x > y).sum(), x.cumsum(0), (x & 7) | 1, x << 1


def _truths(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    a, b = x > 0, x < 1
    return a & b, a | b, ~a, a ^ b, torch.where(a, x, 0.0), a.any(), a.all()


def _mixed(x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x + n, n * 0.5, n / 2, x.double() + n, n.to(torch.uint8) + 1, x.half().float()


def _reductions(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (
        x.var(-1),
        x.std(0),
        x.amax(1),
        x.argmax(1),
        x.prod(0),
        x.norm(dim=1),
        x.logsumexp(1),
        x.cumsum(1),
    )


def _scalars(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return 1 - x, 2 / x, x**2, 2**x, x - 1, torch.clamp(x, 0.2), torch.fmod(x, 2.0), x.round()


def _half() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).half()


def _bfloat16() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 4)).bfloat16()


def _double() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4), nn.LogSoftmax(-1)).double()


def _of(dtype: torch.dtype):
    return drawn(lambda: (torch.randn(3, 8).to(dtype),))


def _pairs():
    return [(torch.randint(-9, 9, (5,)), torch.randint(-9, 9, (5,))) for _ in range(3)]


PROGRAMS = (
    Program("float16", _half, _of(torch.float16), atol=5e-3, tags="half"),
    Program("bfloat16", _bfloat16, _of(torch.bfloat16), atol=5e-2, tags="half"),
    Program("float64", _double, _of(torch.float64), atol=1e-9),
    Program("integers", lambda: Of(_integers), _pairs),
    Program("truths", lambda: Of(_truths), normal(6)),
    Program(
        "mixed_types",
        lambda: Of(_mixed),
        drawn(lambda: (torch.randn(5), torch.randint(0, 9, (5,)))),
        atol=2e-3,
        tags="half",
    ),
    Program("reductions", lambda: Of(_reductions), normal(4, 6)),
    Program("scalars", lambda: Of(_scalars), drawn(lambda: (torch.rand(6) + 0.5,))),
)
