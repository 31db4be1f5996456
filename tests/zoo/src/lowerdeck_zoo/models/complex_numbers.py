"""Complex numbers, by kernels or by their parts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.export import Dim

from lowerdeck_zoo.program import Program, drawn

Function = Callable[[Tensor, Tensor, Tensor], Tensor]


class Pairs(nn.Module):
    """Applies functions to complex numbers that are made of pairs, and returns pairs."""

    def __init__(self, functions: list[Function], rows: int = 6) -> None:
        super().__init__()
        self.functions = functions
        self.register_buffer("turn", torch.randn(rows, 8, 2))

    def forward(self, x: Tensor, y: Tensor) -> list[Tensor]:
        c, d = torch.view_as_complex(x * self.turn), torch.view_as_complex(y)
        results = [function(c, d, y) for function in self.functions]
        return [torch.view_as_real(one) if one.is_complex() else one for one in results]


# Several in one program, to save the time of exporting each.
_FUNCTIONS = {
    "products": [
        lambda c, d, _: c * d,
        lambda c, _, y: c * y[0, 0, 0],
        lambda c, _d, _y: c * (1 + 2j),
        lambda c, d, _: c * d[:, :1],
    ],
    "quotients": [
        lambda c, d, _: c / d,
        lambda c, _d, _y: c / 2,
        lambda c, _, y: c / y[..., 0],
        lambda c, _, y: y[..., 1] / c,
        lambda c, _d, _y: 2 / c - c / (1 + 2j),
    ],
    "sums": [
        lambda c, d, _: torch.add(c, d, alpha=2) - c,
        lambda c, _d, _y: 2 - c,
        lambda c, _, y: c + y[..., 1],
        lambda c, _d, _y: c.sum(1).mean(),
    ],
    "matrices": [
        lambda c, d, _: torch.bmm(c[None], d.T[None]),
        lambda c, d, _: torch.einsum("ij,ik->jk", c, d),
    ],
    "parts": [
        lambda c, _d, _y: c.conj() * 1j,
        lambda c, _d, _y: c.abs() + c.angle() + c.real - c.imag,
        lambda _c, _, y: torch.polar(y[..., 0], y[..., 1]),
        lambda _c, _, y: torch.complex(y[..., 0], y[..., 1]),
        lambda c, _d, _y: -c.exp(),
    ],
    "shapes": [
        lambda c, d, _: torch.cat([c, d], 1)[:, 3:11:2].T.contiguous(),
        lambda c, d, _: torch.stack([c, d], 1).flip(0).roll(1, 2),
        lambda c, _d, _y: torch.cat(c.split([3, 5], 1)[::-1], 1)[torch.tensor([2, 0])],
        lambda c, _d, _y: torch.cat(c.unbind(1)).reshape(4, 12).repeat(2, 1),
        lambda c, d, y: torch.where(y[..., 0] > 0, c, d).select(1, 3),
        lambda c, _d, _y: nn.functional.pad(c.index_select(0, torch.tensor([1, 1])), (1, 2)),
        lambda c, _d, _y: c[:1].squeeze(0).unsqueeze(1).expand(8, 3),
    ],
    "transforms": [
        lambda c, _d, _y: torch.fft.fft(c),
        lambda c, _d, _y: torch.fft.ifft2(c, norm="ortho"),
        lambda _c, _, y: torch.fft.fft2(y[..., 0]),
        lambda _c, _, y: torch.fft.irfft(torch.fft.rfft(y[..., 0])[:, :4], n=8),
        lambda c, _d, _y: torch.fft.fftshift(torch.fft.fft(c, dim=0)),
        lambda c, _d, _y: torch.fft.hfft(c),
    ],
}
_VARYING = [
    *_FUNCTIONS["products"],
    *_FUNCTIONS["quotients"],
    *_FUNCTIONS["sums"][:3],
    *_FUNCTIONS["parts"],
    lambda c, d, _: (c.unsqueeze(1).transpose(0, 1) * d).permute(1, 2, 0).clone(),
    lambda c, d, _: torch.cat([c, d], 1)[:, 3:11:2].T.contiguous(),
    lambda c, _d, _y: c[:, :3].unsqueeze(0).expand(2, -1, -1).reshape(2, -1).sum(0),
    lambda c, d, y: torch.where(y[..., 0] > 0, c, d).select(1, 3),
]
_SIZE = Dim("size", min=2, max=20)


def _any_size(first: int) -> Program:
    return Program(
        f"complex_of_any_size_{first}",
        lambda: Pairs(_VARYING[first::2], rows=1),
        lambda: [(torch.randn(n, 8, 2), torch.randn(n, 8, 2)) for n in (6, 2, 9)],
        ({0: _SIZE}, {0: _SIZE}),
        tags="dynamic",
        atol=1e-3,
    )


PROGRAMS = (
    *(
        Program(
            f"complex_{name}",
            lambda functions=functions: Pairs(functions),
            drawn(lambda: (torch.randn(6, 8, 2), torch.randn(6, 8, 2))),
            atol=1e-3,
        )
        for name, functions in _FUNCTIONS.items()
    ),
    *(_any_size(first) for first in range(2)),
)
