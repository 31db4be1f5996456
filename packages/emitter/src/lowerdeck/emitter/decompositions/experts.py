"""Grouped matrix products of mixtures of experts, and the rules to apply before partitioning."""

from __future__ import annotations

from collections.abc import Callable, Container
from functools import reduce
from typing import Any

import torch

from lowerdeck.emitter.decompositions.volumes import conv3d
from lowerdeck.torch_base import OpOverload


def expert_rules() -> dict[OpOverload, Callable[..., Any]]:
    """Return rules for the grouped matrix products of torch and of loaded operator libraries."""
    rules: dict[OpOverload, Callable[..., Any]] = {}
    for space, name, rule in (
        ("aten", "_grouped_mm", _torch_product),
        ("transformers", "grouped_mm_fallback", grouped_product),
    ):
        packet = getattr(getattr(torch.ops, space), name, None)
        if packet is not None:
            rules[packet.default] = rule
    return rules


def pre_partition_rules(selective: Container[OpOverload]) -> dict[OpOverload, Callable[..., Any]]:
    """Return rules to apply before partitioning, so that backends get the resulting operators.

    Args:
        selective: Operators for which every partitioner supports only some calls; a rule
            decomposes the other calls.
    """
    volumes = torch.ops.aten.conv3d.default
    return {**expert_rules(), **({volumes: conv3d} if volumes in selective else {})}


def grouped_product(
    input: torch.Tensor,  # noqa: A002 - the name in the schema
    weight: torch.Tensor,
    offs: torch.Tensor,
) -> Any:
    """Return the product of each row with the weight of its group.

    If there are at most as many rows as groups, the weight of each row is gathered. Otherwise each
    weight multiplies all rows, with the rows of other groups set to zero: XNNPACK can multiply
    whole matrices, but cannot select rows. A row with an infinite element then becomes NaN.

    Args:
        input: The rows, sorted by group, shape (rows, inner).
        weight: The weights, shape (groups, inner, columns).
        offs: End of each group; rows after the last end give zeros.
    """
    rows, groups = input.size(0), weight.size(0)
    if not isinstance(groups, int):
        return NotImplemented
    # A row belongs to the first group that ends after it.
    group = (offs.reshape(1, -1) <= torch.arange(rows).reshape(-1, 1)).to(torch.int64).sum(1)
    if isinstance(rows, int) and rows <= groups:
        chosen = torch.index_select(weight, 0, group.clamp(max=groups - 1))
        product = torch.bmm(input.unsqueeze(1), chosen).squeeze(1)
        return torch.where((group < groups).unsqueeze(1), product, 0.0)
    chosen = (group.unsqueeze(1) == torch.arange(groups)).to(input.dtype)
    parts = [torch.mm(input * chosen[:, i : i + 1], weight[i]) for i in range(groups)]
    return reduce(torch.add, parts)


def _torch_product(
    self: torch.Tensor,
    mat2: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    if offs is None or bias is not None or (self.dim(), mat2.dim()) != (2, 3):
        return NotImplemented
    product = grouped_product(self, mat2, offs)
    return product if product is NotImplemented or out_dtype is None else product.to(out_dtype)
