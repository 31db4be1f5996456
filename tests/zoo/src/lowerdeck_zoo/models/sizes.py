"""Arithmetic on sizes, rules for sizes that vary, and sizes that become 0."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812  (the name that everyone knows)
from torch.export import Dim

from lowerdeck_zoo.program import Of, Program, together


def _powers(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    n, m = x.shape
    return x * n**2, torch.ones(n**3), x * n**0.5, x * m**-1.5, x * 2**n, x * 0.5**m


def _rounding(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    n = x.shape[0]
    return x * math.floor(n / 2.5), x * round(n / 3)


def _truths(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    n, m = x.shape
    return (
        x * torch.sym_ite(n != 3, 2, 5),
        x * torch.sym_ite((n > 3) & (m > 2), 2, 5),
        x * torch.sym_ite((n > 3) | (m > 2), 2, 5),
    )


def _padding(x: torch.Tensor) -> torch.Tensor:
    return F.pad(x, (0, 9 - x.shape[1], -1, 2))


def _tables(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    chosen = (x > 0).long()
    return (
        torch.zeros(3, x.shape[1]).scatter_reduce(0, chosen, x, "amax"),
        torch.sort(chosen, dim=0, stable=True)[1],
        torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0])),
    )


def _volume(x: torch.Tensor) -> torch.Tensor:
    volume = x.reshape(1, 1, x.shape[0], x.shape[1], 1).expand(-1, 2, -1, -1, 4)
    weight = torch.arange(48.0).reshape(3, 2, 2, 2, 2) / 48
    y = F.conv3d(volume, weight, padding=1)
    return F.max_pool3d(y, 2, 1) + F.avg_pool3d(y, 2, 1)


_SIZES = ((4, 5), (3, 3), (9, 9), (2, 2), (2, 7))
_DIMS = {0: Dim("n", min=2, max=9), 1: Dim("m", min=2, max=9)}

PROGRAMS = (
    *(
        Program(
            f"sizes_{function.__name__.strip('_')}",
            lambda function=function: Of(function),
            lambda: [(torch.randn(*size),) for size in _SIZES],
            ((_DIMS,),),
        )
        for function in (_powers, _rounding, _truths, _padding, _tables, _volume)
    ),
    Program(
        "sizes_that_become_0",
        together(
            lambda x: x @ torch.ones(5, 4).mT,
            lambda x: x.mT.contiguous(),
            lambda x: (x * 2).view(-1, 2),
            lambda x: torch.cat([x, x]),
            lambda x: x.sum(0),
            lambda x: x.nonzero(),
            lambda x: x[x > 0],
        ),
        lambda: [
            *((torch.randn(n, 4),) for n in (3, 0, 8)),
            *((torch.zeros(n, 4),) for n in (8, 2)),
        ],
        (({0: Dim("rows", min=0, max=8)},),),
    ),
)
