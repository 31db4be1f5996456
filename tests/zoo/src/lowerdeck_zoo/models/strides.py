"""Views, windows and lists of views whose strides a program does not have."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (the name that everyone knows)
from torch import nn
from torch.export import Dim

from lowerdeck_zoo.program import Of, Program, drawn, normal, together

attend = F.scaled_dot_product_attention


def heads(x: torch.Tensor, count: int = 2) -> torch.Tensor:
    batch, length, features = x.shape
    return x.view(batch, length, count, features // count).transpose(1, 2)


def joined(x: torch.Tensor) -> torch.Tensor:
    batch, count, length, features = x.shape
    return x.transpose(1, 2).view(batch, length, count * features)


_LISTS = {
    "split_with_sizes": lambda x: x.split([2, 4], 1),
    "unsafe_split": lambda x: torch.unsafe_split(x, 2, 1),
    "unsafe_split_with_sizes": lambda x: torch.unsafe_split_with_sizes(x, [2, 4], 1),
    "tensor_split": lambda x: torch.tensor_split(x, 4, 1),
    "unbind": lambda x: x.unbind(1),
    "hsplit": lambda x: x.hsplit(3),
    "var_mean": lambda x: torch.var_mean(x, 1),
    "topk": lambda x: x.topk(2, 1),
    "max": lambda x: x.max(1),
    "sort": lambda x: x.sort(1),
    "layer norm": lambda x: torch.native_layer_norm(x, [6], None, None, 1e-5),
    "meshgrid": lambda x: torch.meshgrid(x[:, 0], x[0], indexing="ij"),
}
_BOUNDS = (None, 0, 1, 2, 3, -1, -2, -3, 9, -9)
_SHAPES = ((4,), (4, 3), (1, 4, 3), (4, 1, 3))


def views(x: torch.Tensor) -> Iterator[torch.Tensor]:
    for dim in range(x.dim()):
        size = x.shape[dim]
        for start, stop in itertools.product(_BOUNDS, _BOUNDS):
            index = (slice(None),) * dim + (slice(start, stop),)
            yield x[index]
        yield x[(slice(None),) * dim + (slice(1, None, 2),)]
        for index in range(-size, size):
            yield x.select(dim, index)
            yield x.select(dim - x.dim(), index)
        if size >= 3:
            yield from x.split([1, size - 1], dim)
            yield from x.split([2, size - 2], dim - x.dim())
            yield from x.split(3, dim)
        yield from x.unbind(dim)
        yield from x.chunk(2, dim)
    for order in itertools.permutations(range(x.dim())):
        yield x.permute(order)
        yield x.permute([dim - x.dim() for dim in order])
    yield x.unsqueeze(0).unsqueeze(-1)
    yield x.reshape(-1)[1:].view(-1)
    yield x.flatten()[2:][-2:]


class AllViews(nn.Module):
    """Adds each view to itself, so that it is read, and returns some of them as they are."""

    def forward(self, x: torch.Tensor) -> Any:
        y = x * 2
        found = [view for view in views(y) if view.numel()]
        return [view + view for view in found], found[::7]


def _causal(x: torch.Tensor) -> torch.Tensor:
    return joined(attend(heads(x), heads(x * 2), heads(x), is_causal=True))


def _masked(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return joined(attend(heads(x), heads(x), heads(x), attn_mask=mask))


def _numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(1.0, 1.0 + torch.Size(shape).numel()).view(shape) + torch.rand(())


_ROWS = Dim("rows", min=2, max=9)
_RESIZED = ((5, 7), (20, 3), (9, 8), (1, 1))


def _resized(size: tuple[int, int], corners: bool) -> Any:
    return lambda x: F.interpolate(
        x, size=size, mode="bicubic", antialias=True, align_corners=corners
    )


PROGRAMS = (
    Program(
        "attention_viewed",
        together(
            lambda x: joined(attend(heads(x), heads(x * 2), heads(x + 1))),
            _causal,
            lambda x: attend(heads(x), heads(x), heads(x)).reshape(2, 3, 8),
            lambda x: joined(attend(heads(x), heads(x), heads(x), scale=0.3)),
            lambda x: joined(
                attend(
                    *(heads(x, 4), heads(x[..., :4] + 0, 2), heads(x[..., 4:] + 0, 2)),
                    enable_gqa=True,
                )
            ),
        ),
        normal(2, 3, 8),
    ),
    Program(
        "attention_viewed_with_a_mask",
        lambda: Of(_masked),
        lambda: [(torch.randn(2, 3, 8), torch.rand(3, 3) + torch.eye(3) > p) for p in (0.5, 1, 0)],
    ),
    Program(
        "attention_viewed_of_any_length",
        lambda: Of(_causal),
        lambda: [(torch.randn(2, n, 8),) for n in (3, 2, 9)],
        (({1: Dim("length", min=2, max=9)},),),
        tags="dynamic",
    ),
    Program(
        "turned_of_a_size_from_data",
        together(
            lambda x: x.nonzero().t(),
            lambda x: x.nonzero().T + 1,
            lambda x: x.nonzero().transpose(0, 1),
            lambda x: x.nonzero().permute(1, 0),
            lambda x: x.nonzero().unsqueeze(0).permute(1, 0, 2),
            lambda x: x.nonzero().t().reshape(-1),
        ),
        lambda: [
            (torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, 0.0]]),),
            (torch.zeros(2, 3).index_fill(0, torch.tensor(1), 2.0),),
            (torch.ones(2, 3),),
            (torch.tensor([[0.0, 0.0, 5.0], [0.0, 0.0, 0.0]]),),
        ],
        tags="dynamic",
    ),
    *(
        Program(
            f"several_results_{name.replace(' ', '_')}",
            lambda function=function: Of(function),
            lambda: [(torch.randn(n, 6),) for n in (4, 2, 9)],
            (({0: _ROWS},),),
            tags="dynamic",
        )
        for name, function in _LISTS.items()
    ),
    Program(
        "halves_of_a_dimension_that_varies",
        lambda: Of(lambda x: x.split(x.shape[0] // 2)),
        lambda: [(torch.randn(2 * n, 3),) for n in (4, 1, 6)],
        (({0: 2 * Dim("half", min=1, max=6)},),),
        tags="dynamic",
    ),
    Program(
        "view_of_a_copy_of_a_turned_tensor",
        lambda: Of(lambda x: (x.transpose(1, 2) * 2).contiguous().view(2, 12)),
        normal(2, 3, 4),
    ),
    Program(
        "bicubic_images_averaged",
        together(
            *(_resized(size, corners) for size in _RESIZED for corners in (False, True)),
            lambda x: F.interpolate(x, scale_factor=(0.4, 1.7), mode="bicubic", antialias=True),
        ),
        normal(1, 2, 9, 8),
    ),
    *(
        Program(
            f"views_of_{'x'.join(map(str, shape))}",
            AllViews,
            drawn(lambda shape=shape: (_numbered(shape),)),
            atol=0,
            rtol=0,
        )
        for shape in _SHAPES
    ),
)
