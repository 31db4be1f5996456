"""Models that keep state between calls."""

from __future__ import annotations

import torch
from torch import nn

from lowerdeck_zoo.program import Program, normal


class Counter(nn.Module):
    def __init__(self, start: float) -> None:
        super().__init__()
        self.register_buffer("total", torch.full((3,), start))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(x)
        return self.total * 2


class KVCache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(1, 8, 4))
        self.register_buffer("values", torch.zeros(1, 8, 4))
        self.q, self.k, self.v = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        self.keys[:, place] = self.k(x)
        self.values[:, place] = self.v(x)
        seen = torch.arange(8) <= place
        scores = (self.q(x) @ self.keys.transpose(1, 2)).masked_fill(~seen, -1e9)
        return scores.softmax(-1) @ self.values


class Swap(nn.Module):
    """Two buffers trade places: the writes must be parallel."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("a", torch.tensor([1.0, 2.0]))
        self.register_buffer("b", torch.tensor([10.0, 20.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.a.clone()
        self.a.copy_(self.b)
        self.b.copy_(a)
        return self.a + x


class OldValue(nn.Module):
    """Returns the value from before the write."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        old = self.last * 1
        self.last.copy_(x)
        return old


class NotPersistent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("table", torch.arange(6.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return x * self.table + self.steps


class BatchStatistics(nn.Module):
    """An exponential average, written by slices."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean[1:3] = 0.9 * self.mean[1:3] + 0.1 * x
        return self.mean.sum(0)


PROGRAMS = (
    Program("counter_from_zero", lambda: Counter(0.0), normal(3)),
    Program("counter_from_five", lambda: Counter(5.0), normal(3)),
    Program(
        "kv_cache", KVCache, lambda: [(torch.randn(1, 1, 4), torch.tensor([i])) for i in range(4)]
    ),
    Program("buffer_swap", Swap, normal(2)),
    Program("old_value_read", OldValue, normal(2)),
    Program("not_persistent", NotPersistent, normal(6)),
    Program("write_by_slices", BatchStatistics, normal(2, 3)),
)
