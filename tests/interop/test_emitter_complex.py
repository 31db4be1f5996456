"""Complex numbers give eager's values, by kernels or by their parts; else they are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lowerdeck.emitter import MissingKernelError, emit
from lowerdeck.runner import load
from lowerdeck_zoo import assert_close, official

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not official.available(), reason=official.REASON),
]

Function = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Pairs(nn.Module):
    """Applies a function to complex numbers that are made of pairs, and returns pairs."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("turn", torch.randn(6, 8, 2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        c, d = torch.view_as_complex(x * self.turn), torch.view_as_complex(y)
        made = self.function(c, d, y)
        return torch.view_as_real(made) if made.is_complex() else made


# Several in one program, to save the time of exporting each.
RIGHT: dict[str, list[Function]] = {
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
        lambda c, d, _: c @ d.T,
        lambda c, d, _: torch.bmm(c[None], d.T[None]),
        lambda c, d, _: torch.einsum("ij,ik->jk", c, d),
        lambda c, d, _: nn.functional.linear(c, d, d[:, 0]),
        lambda c, _, y: c @ y[..., 0].T.to(torch.complex64),
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


def _all_of(functions: list[Function]) -> Function:
    def joined(c: torch.Tensor, d: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        results = [function(c, d, y) for function in functions]
        flat = [torch.view_as_real(r) if r.is_complex() else r for r in results]
        return torch.cat([part.reshape(-1) for part in flat])

    return joined


@pytest.mark.parametrize("name", RIGHT)
def test_complex_numbers_give_eagers_values(name: str) -> None:
    torch.manual_seed(0)
    module = Pairs(_all_of(RIGHT[name])).eval()
    calls = [(torch.randn(6, 8, 2), torch.randn(6, 8, 2)) for _ in range(2)]
    data = emit(torch.export.export(module, calls[0])).to_bytes()
    outcome = official.run(data, [official.Call(call) for call in calls])
    assert isinstance(outcome, official.Ran), outcome
    program = load(data, memory="poison")
    for call, outputs in zip(calls, outcome.outputs, strict=True):
        assert_close(outputs, [module(*call)], atol=1e-3, rtol=1e-3)
        assert_close([program.run("forward", *call)], [module(*call)], atol=1e-3, rtol=1e-3)


VARYING: list[Function] = [
    *RIGHT["products"],
    *RIGHT["quotients"],
    *RIGHT["sums"][:3],
    *RIGHT["parts"],
    lambda c, d, _: (c.unsqueeze(1).transpose(0, 1) * d).permute(1, 2, 0).clone(),
    lambda c, d, _: torch.cat([c, d], 1)[:, 3:11:2].T.contiguous(),
    lambda c, _d, _y: c[:, :3].unsqueeze(0).expand(2, -1, -1).reshape(2, -1).sum(0),
    lambda c, d, y: torch.where(y[..., 0] > 0, c, d).select(1, 3),
]


@pytest.mark.parametrize("half", range(2))
def test_numbers_whose_sizes_vary_give_eagers_values(half: int) -> None:
    # No name of pairs can be a complex tensor there: rotary embeddings of DeepSeek and Llama 4.
    torch.manual_seed(0)
    module = Pairs(_all_of(VARYING[half::2])).eval()
    module.turn.data = torch.randn(1, 8, 2)
    size = torch.export.Dim("size", min=2, max=20)
    calls = [(torch.randn(n, 8, 2), torch.randn(n, 8, 2)) for n in (6, 2, 9)]
    exported = torch.export.export(module, calls[0], dynamic_shapes=({0: size}, {0: size}))
    data = emit(exported).to_bytes()
    outcome = official.run(data, [official.Call(call) for call in calls])
    assert isinstance(outcome, official.Ran), outcome
    for call, outputs in zip(calls, outcome.outputs, strict=True):
        assert_close(outputs, [module(*call)], atol=1e-3, rtol=1e-3)


REFUSED: dict[str, Function] = {
    "power": lambda c, _d, _y: c**3,
    "comparison": lambda c, d, _: c == d,
    "root": lambda c, _d, _y: c.sqrt(),
    "triangle": lambda c, _d, _y: c.tril(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_kernel_computes_on_complex_numbers_is_refused(name: str) -> None:
    args: Any = (torch.randn(6, 8, 2), torch.randn(6, 8, 2))
    exported = torch.export.export(Pairs(REFUSED[name]), args)
    with pytest.raises(MissingKernelError, match="complex"):
        emit(exported)
