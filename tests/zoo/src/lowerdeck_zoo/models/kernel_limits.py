"""Calls that kernels of the runtime refuse or compute otherwise, and constants in every form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (the name that everyone knows)
from torch import nn

from lowerdeck_zoo.program import Of, Program, drawn, normal, together


def _integers(x: torch.Tensor) -> tuple[Any, ...]:
    three = torch.full((6,), 3)
    shifted = (x.abs() << 2) + (x.abs() >> 1)
    return x + 0.5, x - 0.5, torch.remainder(x, three), x % 3, shifted


def _numbers(x: torch.Tensor, n: torch.Tensor) -> tuple[Any, ...]:
    return x.sum(), x.cumsum(0), n.sum(dtype=torch.float32)


def _floats(x: torch.Tensor, i: torch.Tensor) -> tuple[Any, ...]:
    layer = torch.arange(10.0).view(2, 5)
    return (
        *(x.double().log_softmax(-1), x.index_select(0, i)),
        *(F.pad(x, (-1, 2, 1, -1)), F.linear(x[0], layer, layer[:, 0]), F.layer_norm(x, (5,))),
        *(torch.sort(x), x[0].argsort(descending=True), torch.msort(x), x.nonzero()),
        *(torch.masked_select(x[0], x > 0), torch.linalg.vector_norm(x, dim=-1)),
        *(x.to(torch.float64, non_blocking=True), x.as_strided((2, 3), (1, 4), 2)),
        *(
            torch.maximum(x, torch.tensor(0.5)) + x.to(torch.int64),
            torch.logit(x.sigmoid().half()),
        ),
        *(x[:, :0] @ torch.ones(0, 3), torch.bmm(x[None, :, :0], torch.ones(1, 0, 3))),
        x.sum() * x.half().sum().item(),
    )


_FORMS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda b: b,
    lambda b: b.t().contiguous().t(),
    lambda b: b[:1].expand(4, 6),
    lambda b: b.repeat_interleave(3, 1)[:, ::3],
    lambda b: torch.cat([b, b])[2:6],
    lambda b: torch.complex(b, b).conj().imag,
    lambda b: nn.Parameter(b.t().contiguous().t()),
)


class Constants(nn.Module):
    """Adds small constants of many forms, a third of them with the content of another.

    The copy of such a constant is dropped, and its memory used again.
    """

    def __init__(self) -> None:
        super().__init__()
        content = [torch.randn(4, 6) for _ in range(5)]
        for number in range(12 * len(_FORMS)):
            form = _FORMS[number % len(_FORMS)]
            value = content[0].clone() if number % 3 == 0 else content[number % 5]
            self.register_buffer(f"c{number}", form(value))
        for number in range(8):
            format_ = (torch.contiguous_format, torch.channels_last)[number % 2]
            image = content[number // 2 % 5].view(1, 2, 3, 4).round()
            self.register_buffer(f"image{number}", image.to(memory_format=format_))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        images = x.view(1, 2, 3, 4), x.view(1, 2, 3, 4).to(memory_format=torch.channels_last)
        return [
            x + buffer if buffer.dim() == 2 else sum(image * buffer for image in images)
            for buffer in self.buffers()
        ]


def _forms(x: torch.Tensor) -> list[torch.Tensor]:
    return [x + form(torch.arange(24.0).view(4, 6)) for form in _FORMS[:5]]


PROGRAMS = (
    Program(
        "kernel_limits_of_integers",
        lambda: Of(_integers),
        drawn(lambda: (torch.tensor([-7, -3, 3, 7, 8, -8])[torch.randperm(6)],)),
        tags="dtypes",
    ),
    Program(
        "kernel_limits_of_numbers",
        lambda: Of(_numbers),
        drawn(lambda: (torch.randn(()), torch.randint(-9, 9, ()))),
        atol=1e-6,
        rtol=1e-6,
        tags="dtypes",
    ),
    Program(
        "kernel_limits_of_floats",
        lambda: Of(_floats),
        drawn(lambda: (torch.randn(4, 5), torch.tensor([3, 1], dtype=torch.int32))),
        atol=2e-3,
        tags="dtypes dynamic half",
    ),
    Program(
        *("constants_of_all_forms", Constants, normal(4, 6)),
        tags="shared-weights",
        atol=1e-6,
        rtol=1e-6,
    ),
    Program("constants_made_inside", together(_forms), normal(4, 6), atol=0, rtol=0),
)
