"""Models whose sizes vary: named dimensions, arithmetic on sizes, sizes that depend on data."""

from __future__ import annotations

import torch
from torch import nn
from torch.export import Dim

from lowerdeck_zoo.models.language import GPT
from lowerdeck_zoo.program import Of, Program, normal


def _batches(*rest: int, sizes: tuple[int, ...] = (4, 1, 7)):
    return lambda: [(torch.randn(size, *rest),) for size in sizes]


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3), nn.Softmax(-1))


def _conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1))


def _arithmetic(x: torch.Tensor) -> torch.Tensor:
    rows, columns = x.shape
    y = x.reshape(rows * columns)[: rows * columns // 2]
    return torch.cat([y, torch.ones(rows + 1) * columns]) * (rows / 2)


def _expand(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x[:, None] * y[None, :]).transpose(0, 1).flatten() + torch.arange(
        x.shape[0] * y.shape[0]
    )


def _nonzero(x: torch.Tensor) -> torch.Tensor:
    return torch.nonzero(x > 0).to(torch.float32) * 2


def _select(x: torch.Tensor) -> torch.Tensor:
    return torch.masked_select(x, x > 0) + 1


def _item(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    n = count.item()
    torch._check(n >= 1)
    torch._check(n <= 8)
    return x[:n] * 2


def _filled(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Memory that is made empty and filled piece by piece, its shape known at run time."""
    rows = x.shape[0]
    order = torch.argsort(x[:, 0])
    back = torch.empty_like(order)
    back[order] = torch.arange(rows)
    halves = x.new_empty(rows * 2)
    halves[:rows], halves[rows:] = x[:, 0], x[:, 1]
    table = torch.empty(rows, 2)
    table[:, 0], table[:, 1] = x[:, 1], x[:, 0]
    return x[order][back], halves, table


def _windows() -> nn.Module:
    """Return layers that slide over sizes in many ways."""
    return nn.Sequential(
        *(nn.Conv2d(4, 4, 7, 2, 3), nn.ReLU(), nn.ZeroPad2d(1), nn.MaxPool2d(3, 2, 1)),
        *(nn.ConvTranspose2d(4, 4, 2, 2), nn.Conv2d(4, 4, 3, padding=1, groups=4)),
        *(nn.Upsample(scale_factor=2), nn.PixelShuffle(2), nn.Conv2d(1, 4, 3)),
        *(nn.AvgPool2d(3, 1, 1), nn.Flatten(2), nn.Conv1d(4, 4, 3)),
    )


class _Tubelets(nn.Module):
    """Frames of a video that become tokens, as those of VideoMAE do."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Conv3d(3, 8, (2, 4, 4), (2, 4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.projection(x.permute(0, 2, 1, 3, 4)).flatten(2).transpose(1, 2)


_BATCH = Dim("batch", min=1, max=8)

PROGRAMS = (
    Program("dynamic_mlp", _mlp, _batches(6), ({0: _BATCH},)),
    Program(
        "dynamic_image",
        _conv,
        lambda: [(torch.randn(1, 3, size, 16),) for size in (16, 24, 9)],
        ({2: Dim("height", min=8, max=32)},),
    ),
    Program(
        "dynamic_pooled_lines",
        lambda: Of(lambda x: nn.functional.adaptive_avg_pool1d(x.transpose(1, 2), 1).flatten(1)),
        _batches(5, 6),
        (({0: _BATCH},),),
    ),
    Program(
        "dynamic_extremes_and_gather",  # GroundingDino
        lambda: Of(lambda x: (*x.cummax(0), x[:, 0][(torch.arange(x.shape[0]) < 0).long()])),
        _batches(5),
        (({0: _BATCH},),),
    ),
    Program(
        "dynamic_tubelets",
        _Tubelets,
        lambda: [(torch.randn(2, frames, 3, 8, 8),) for frames in (4, 6, 9)],
        ({1: Dim.AUTO(max=9)},),
    ),
    Program(
        "dynamic_windows",
        _windows,
        lambda: [(torch.randn(2, 4, size, 16),) for size in (16, 8, 32, 9, 16)],
        ({2: Dim("height", min=8, max=32)},),
    ),
    Program(
        "dynamic_gpt",
        GPT,
        lambda: [(torch.randint(0, 50, (1, n)),) for n in (8, 3, 16)],
        ({1: Dim("length", min=2, max=16)},),
        tags="shared-weights",
    ),
    Program(
        "size_arithmetic",
        lambda: Of(_arithmetic),
        lambda: [(torch.randn(n, m),) for n, m in ((4, 3), (2, 6), (7, 5))],
        (({0: Dim("rows", min=2, max=9), 1: Dim("columns", min=2, max=9)},),),
    ),
    Program(
        "two_dynamic_inputs",
        lambda: Of(_expand),
        lambda: [(torch.randn(n), torch.randn(m)) for n, m in ((3, 4), (5, 2), (2, 6))],
        (({0: Dim("n", min=2, max=6)}, {0: Dim("m", min=2, max=6)}),),
    ),
    Program(
        "filled_piece_by_piece",
        lambda: Of(_filled),
        lambda: [(torch.randn(n, 3),) for n in (4, 1, 8)],
        (({0: _BATCH},),),
        tags="in-place",
    ),
    Program("nonzero", lambda: Of(_nonzero), normal(4, 5)),
    Program("masked_select", lambda: Of(_select), normal(4, 5)),
    Program(
        "size_from_item",
        lambda: Of(_item),
        lambda: [(torch.randn(8, 2), torch.tensor(n)) for n in (3, 8, 1)],
    ),
)
