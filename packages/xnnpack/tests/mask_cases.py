"""Attention under masks: known ahead of time, and given at run time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from case_making import Case, case  # type: ignore[import-not-found]
from torch.export import Dim

Tensor = torch.Tensor
LEAST = torch.finfo().min
HEADS = ((2, 3, 5, 4), (2, 3, 6, 4), (2, 3, 6, 7))
GROUPS = ((2, 6, 5, 4), (2, 2, 6, 4), (2, 2, 6, 7))
attend: Any = F.scaled_dot_product_attention


def masked(mask: Tensor, **options: Any) -> Callable[..., Any]:
    """Return an attention whose mask is a constant of the program, or computed of nothing else."""

    def function(query: Tensor, key: Tensor, value: Tensor) -> Any:
        known = mask if mask.is_floating_point() else mask & (torch.ones(1) > 0)
        return attend(query, key, value, known, **options)

    return function


def masks() -> Iterator[Case]:
    """Yield all cases."""
    triangle = torch.ones(5, 6).tril().bool()
    nothing_in_row_2 = triangle & (torch.arange(5) != 2)[:, None]
    floats = torch.randn(3, 5, 6).masked_fill(torch.rand(3, 5, 6) > 0.7, -torch.inf)
    kinds = {
        "triangle": triangle,
        "all": torch.ones(2, 1, 5, 6).bool(),
        "one_row_of_columns": torch.tensor([[True, True, False, True, False, True]]),
        "empty_row": nothing_in_row_2,
        "expanded": triangle.expand(2, 3, 5, 6),
        "floats": floats,
        "floats_empty_row": floats.masked_fill(~nothing_in_row_2, -torch.inf),
        "least_floats": torch.zeros(1, 1, 5, 6).masked_fill(~nothing_in_row_2, LEAST),
    }
    functions: dict[str, Any] = {name: masked(mask) for name, mask in kinds.items()}
    yield case("mask_triangle", functions["triangle"], *HEADS)
    yield case("mask", functions | {"none": attend}, *HEADS)
    by_head = torch.rand(2, 6, 5, 6) > 0.4
    by_groups = {"triangle": nothing_in_row_2, "heads": by_head, "all": by_head | True}
    functions = {
        name: masked(mask, enable_gqa=True, scale=0.7) for name, mask in by_groups.items()
    }
    functions["causal"] = lambda *args: attend(*args, is_causal=True, enable_gqa=True)
    yield case("mask_of_groups", functions, *GROUPS)
    yield case("attention_causal", lambda *args: attend(*args, is_causal=True, scale=0.3),
               (2, 5, 4), (2, 6, 4), (2, 6, 7))  # fmt: skip
    yield from given_masks()
    yield from fills()


def mixed(*shape: int) -> Tensor:
    """Return numbers among which are both infinity and the least number, and rows of one alone."""
    kinds = torch.stack([torch.randn(shape), torch.full(shape, -torch.inf)])
    mask = kinds.gather(0, torch.randint(0, 2, (1, *shape)))[0]
    mask[..., :1] = torch.where(torch.rand(shape)[..., :1] > 0.5, mask[..., :1], LEAST)
    mask[..., 1, :] = -torch.inf
    mask[..., 2, :] = LEAST
    mask[..., 3, :] = torch.tensor([LEAST, -torch.inf]).repeat(shape[-1])[: shape[-1]]
    return mask


def given_masks() -> Iterator[Case]:
    """Yield attentions whose masks are known only at run time."""
    kinds = {
        "bools": lambda *shape: (torch.rand(shape) > 0.4) & (torch.arange(5)[:, None] != 3),
        "floats": mixed,
    }
    for kind, make in kinds.items():
        for name, shape, sizes in (
            ("rows", (5, 6), HEADS),
            ("heads", (1, 3, 5, 6), HEADS),
            ("batches", (2, 1, 5, 6), HEADS),
            ("one_column", (5, 1), HEADS),
            ("grouped_rows", (5, 6), GROUPS),
            ("grouped_heads", (2, 6, 5, 6), GROUPS),
            ("grouped_batches", (2, 1, 5, 6), GROUPS),
        ):
            tensors = tuple(torch.randn(one) for one in sizes)
            yield case(
                f"mask_given_{kind}_{name}",
                lambda *args, grouped=sizes is GROUPS: attend(*args, enable_gqa=grouped),
                *(*tensors, make(*shape)),
                others=tuple((*tensors, make(*shape)) for _ in range(2)),
            )

    def layers(x: Tensor, mask: Tensor) -> Any:
        y = attend(x, x + 1, x, mask)
        return attend(y, x, y - 1, mask)

    yield case("mask_given_for_two", layers, (2, 3, 6, 4), torch.rand(2, 1, 1, 6) > 0.4)
    images = torch.randn(2, 3, 5, 6).contiguous(memory_format=torch.channels_last)
    yield case("mask_given_channels_last", attend, *HEADS, images)
    length = Dim("length", min=1, max=9)

    def inputs(rows: int) -> tuple[Tensor, ...]:
        keys = torch.randn(2, 3, 6, 4)
        return torch.randn(2, 3, rows, 4), keys, keys + 1, torch.rand(rows, 6) > 0.4

    yield case(
        "mask_given_dynamic",
        attend,
        *inputs(4),
        dynamic=(({2: length}, None, None, {0: length}),),
        others=tuple(inputs(rows) for rows in (1, 9, 3)),
    )


def fills() -> Iterator[Case]:
    """Yield scores that are filled with a low number where a mask is True, or False."""
    numbers = (-torch.inf, -1e9, -1e4, LEAST)
    scores = 1e4 * torch.randn(2, 3, 5, 6)
    scores[0, 0, 0] = torch.tensor([torch.inf, -torch.inf, 3e38, -3e38, 0.0, -0.0])

    def all_forms(x: Tensor, mask: Tensor, mask_of_keys: Tensor) -> list[Tensor]:
        y = x * 1.0
        filled = (y.masked_fill(mask, one) for one in numbers)
        others = (torch.where(mask_of_keys, y, one) for one in numbers)
        return [one + 0.0 for one in (*filled, *others, torch.where(mask, -torch.inf, y))]

    def given(rows: int) -> tuple[Tensor, ...]:
        mask, keys = torch.rand(rows, 6) > 0.5, torch.rand(2, 1, 1, 6) > 0.5
        mask[0, 1] = True  # a score of -inf
        return scores[:, :, :rows].contiguous(), mask, keys

    _, triangle, keys = given(5)
    yield case("fill_constant", lambda x: all_forms(x, triangle, keys), scores)
    length = Dim("length", min=1, max=5)
    yield case(
        "fill_given",
        all_forms,
        *given(5),
        dynamic=(({2: length}, {0: length}, None),),
        others=(given(3), given(1)),
    )
