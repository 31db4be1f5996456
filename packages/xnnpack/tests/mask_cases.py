"""Attention under masks: known ahead of time, and given at run time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from case_making import Case, Function, case, module  # type: ignore[import-not-found]
from torch import nn
from torch.export import Dim

Tensor = torch.Tensor


class Masked(nn.Module):
    """An attention whose mask is a constant of the program, or computed of nothing else."""

    mask: Tensor

    def __init__(self, mask: Tensor, **options: Any) -> None:
        super().__init__()
        self.register_buffer("mask", mask)
        self.options = options

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = self.mask if self.mask.is_floating_point() else self.mask & (torch.ones(1) > 0)
        return F.scaled_dot_product_attention(query, key, value, mask, **self.options)


def masks() -> Iterator[Case]:
    triangle = torch.ones(5, 6).tril().bool()
    nothing_in_row_2 = triangle.clone()
    nothing_in_row_2[2] = False
    floats = torch.randn(3, 5, 6).masked_fill(torch.rand(3, 5, 6) > 0.7, -torch.inf)
    least = torch.zeros(1, 1, 5, 6).masked_fill(~nothing_in_row_2, torch.finfo().min)
    for name, mask in {
        "triangle": triangle,
        "all": torch.ones(2, 1, 5, 6).bool(),
        "one_row_of_columns": torch.tensor([[True, True, False, True, False, True]]),
        "empty_row": nothing_in_row_2,
        "expanded": triangle.expand(2, 3, 5, 6),
        "floats": floats,
        "floats_empty_row": floats.masked_fill(~nothing_in_row_2, -torch.inf),
        "least_floats": least,
    }.items():
        heads = ((2, 3, 5, 4), (2, 3, 6, 4), (2, 3, 6, 7))
        yield module(f"mask_{name}", Masked(mask), *heads)
    heads = ((2, 6, 5, 4), (2, 2, 6, 4), (2, 2, 6, 7))
    by_head = torch.rand(2, 6, 5, 6) > 0.4
    for name, mask in {
        "triangle": nothing_in_row_2,
        "heads": by_head,
        "all": by_head | True,
    }.items():
        yield module(f"grouped_heads_{name}", Masked(mask, enable_gqa=True, scale=0.7), *heads)
    yield case(
        "grouped_heads_causal",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        *heads,
    )


class Attention(nn.Module):
    """An attention whose mask is an input."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, mask, **self.options)


def mixed(*shape: int) -> Tensor:
    """Return numbers among which are both infinity and the least number, and rows of one alone."""
    least = torch.finfo().min
    kinds = torch.stack([torch.randn(shape), torch.full(shape, -torch.inf)])
    mask = kinds.gather(0, torch.randint(0, 2, (1, *shape)))[0]
    mask[..., :1] = torch.where(torch.rand(shape)[..., :1] > 0.5, mask[..., :1], least)
    mask[..., 1, :] = -torch.inf
    mask[..., 2, :] = least
    mask[..., 3, :] = torch.tensor([least, -torch.inf]).repeat(shape[-1])[: shape[-1]]
    return mask


def given_masks() -> Iterator[Case]:
    """Yield attentions whose masks are known only at run time."""
    kinds = {
        "truths": lambda *shape: (torch.rand(shape) > 0.4) & (torch.arange(5)[:, None] != 3),
        "floats": mixed,
    }
    for kind, make in kinds.items():
        for name, (shape, heads, groups) in {
            "rows": ((5, 6), 3, 3),
            "heads": ((1, 3, 5, 6), 3, 3),
            "batches": ((2, 1, 5, 6), 3, 3),
            "one_column": ((5, 1), 3, 3),
            "grouped_rows": ((5, 6), 6, 2),
            "grouped_heads": ((2, 6, 5, 6), 6, 2),
            "grouped_batches": ((2, 1, 5, 6), 6, 2),
        }.items():
            tensors = (
                torch.randn(one)
                for one in ((2, heads, 5, 4), (2, groups, 6, 4), (2, groups, 6, 7))
            )
            masks = [make(*shape) for _ in range(3)]
            query, key, value = tensors
            yield Case(
                f"mask_given_{kind}_{name}",
                Attention(enable_gqa=heads != groups),
                (query, key, value, masks[0]),
                others=tuple((query, key, value, one) for one in masks[1:]),
            )
    yield from _more_given_masks()


def _more_given_masks() -> Iterator[Case]:
    mask = torch.rand(2, 1, 1, 6) > 0.4
    heads = (torch.randn(2, 3, 6, 4),) * 3

    def layers(x: Tensor, mask: Tensor) -> Tensor:
        y: Tensor = F.scaled_dot_product_attention(x, x + 1, x, mask)
        return F.scaled_dot_product_attention(y, x, y - 1, mask)

    yield Case("mask_given_for_two", Function(layers), (heads[0], mask))
    length = Dim("length", min=1, max=9)
    model = Attention()

    def inputs(rows: int) -> tuple[Tensor, ...]:
        keys = torch.randn(2, 3, 6, 4)
        return torch.randn(2, 3, rows, 4), keys, keys + 1, torch.rand(rows, 6) > 0.4

    yield Case(
        "mask_given_dynamic",
        model,
        inputs(4),
        dynamic=({2: length}, None, None, {0: length}),
        others=tuple(inputs(rows) for rows in (1, 9, 3)),
    )
