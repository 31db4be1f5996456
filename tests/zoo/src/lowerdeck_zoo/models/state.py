"""Models that keep state between calls."""

from __future__ import annotations

import torch
from torch import nn

from lowerdeck_zoo.program import Holding, Program, normal


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


class Swap(Holding, a=lambda: torch.tensor([1.0, 2.0]), b=lambda: torch.tensor([10.0, 20.0])):
    """Two buffers trade places: the writes must be parallel."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.a.clone()
        self.a.copy_(self.b)
        self.b.copy_(a)
        return self.a + x


class OldValue(Holding, last=lambda: torch.ones(2)):
    """Returns the value from before the write."""

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


class BatchStatistics(Holding, mean=lambda: torch.zeros(4, 3)):
    """An exponential average, written by slices."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean[1:3] = 0.9 * self.mean[1:3] + 0.1 * x
        return self.mean.sum(0)


class Cache(nn.Module):
    """Keeps the last rows that it was given; two methods read and write its buffers."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.register_buffer("rows", torch.full((4, 3), start))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def push(self, x: torch.Tensor) -> torch.Tensor:
        self.rows.copy_(torch.cat([self.rows[1:], x]))
        self.count.add_(1)
        return self.rows.sum(0)

    def peek(self, x: torch.Tensor) -> torch.Tensor:
        # Large temporaries, which must not share memory with the state.
        wide = (x @ x.t()).exp().sum() * 0
        self.count.add_(1)
        return self.rows.sum(0) + wide + self.count


def _turns() -> list[tuple[object, ...]]:
    rows = {"peek": 8, "push": 1}
    order = ("peek", "push", "peek", "push", "push", "peek")
    return [(name, torch.randn(rows[name], 3)) for name in order]


class TwoStates(nn.Module):
    """Each method has a buffer of its own, and reads the other's."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mine", torch.arange(4.0))
        self.register_buffer("yours", torch.ones(4))

    def one(self, x: torch.Tensor) -> torch.Tensor:
        self.mine.add_(x)
        return self.mine * 2 + self.yours

    def two(self, x: torch.Tensor) -> torch.Tensor:
        self.yours.mul_(x)
        return self.yours - self.mine


PROGRAMS = (
    Program("counter_from_zero", lambda: Counter(0.0), normal(3), tags="in-place"),
    Program("counter_from_five", lambda: Counter(5.0), normal(3), tags="in-place"),
    Program(
        "kv_cache",
        KVCache,
        lambda: [(torch.randn(1, 1, 4), torch.tensor([i])) for i in range(4)],
        tags="in-place",
    ),
    Program("buffer_swap", Swap, normal(2), tags="in-place"),
    Program("old_value_read", OldValue, normal(2), tags="in-place"),
    Program("not_persistent", NotPersistent, normal(6), tags="in-place"),
    Program("write_by_slices", BatchStatistics, normal(2, 3), tags="in-place"),
    Program(
        "push_peek_from_zero",
        lambda: Cache(0.0),
        _turns,
        methods=("push", "peek"),
        tags="in-place several-methods",
    ),
    Program(
        "push_peek_from_values",
        lambda: Cache(2.5),
        _turns,
        methods=("push", "peek"),
        tags="in-place several-methods",
    ),
    Program(
        "two_states_of_two_methods",
        TwoStates,
        lambda: [(name, torch.randn(4)) for name in ("one", "two", "one", "one", "two")],
        methods=("one", "two"),
        tags="in-place several-methods",
    ),
)
