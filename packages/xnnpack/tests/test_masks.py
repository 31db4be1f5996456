"""Masks written out as models of transformers do it are short in the file, and right."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export

from lowerdeck.lowered_module import lower
from lowerdeck.runner import load


class Attention(nn.Module):
    """Attention whose mask is gathered at all positions and has a row for each query."""

    def __init__(self, *, first: int, causal: bool) -> None:
        super().__init__()
        self.first, self.causal = first, causal

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        batch, length = x.shape[0], kept.shape[1]
        q = kv = torch.arange(length) + 0
        q, kv = q[None, None, :, None], kv[None, None, None, :]
        mask = q.new_ones((), dtype=torch.bool) & (q >= self.first)
        mask = mask & kept.bool()[torch.arange(batch)[:, None, None, None], kv]
        if self.causal:
            mask = mask & (kv <= q)
        mask = mask.expand(batch, -1, length, length)
        x = x[:, None]
        return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)


_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


@pytest.mark.parametrize("by_keyword", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("first", [0, 1])
def test_masks_are_short_and_right(first: int, causal: bool, by_keyword: bool) -> None:
    model = Attention(first=first, causal=causal)
    args = (torch.randn(2, 6, 4), torch.ones(2, 6, dtype=torch.int64))
    batch, length = Dim("batch", max=4), Dim("length", max=8)
    program = export(model, args, dynamic_shapes=({0: batch, 1: length}, {0: batch, 1: length}))
    if by_keyword:
        (node,) = program.graph.find_nodes(op="call_function", target=_ATTENTION)
        node.kwargs = {"attn_mask": node.args[3]}
        node.args = node.args[:3]
    lowered = lower(program, "XnnpackBackend")
    names = [operator.name for operator in lowered.program.execution_plan[0].operators]
    assert "aten::index" not in names
    assert ("aten::bitwise_and" in names) == (first > 0 or causal)
    forward = load(lowered.buffer).method()
    for sizes in ((2, 6), (4, 8), (1, 3)):
        x, kept = torch.randn(*sizes, 4), torch.rand(sizes) > 0.3
        kept[:, 0] = True
        kept = kept.long()
        torch.testing.assert_close(forward(x, kept), model(x, kept))


class Experts(nn.Module):
    """A grouped product, as transformers' mixtures of experts call it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8, 16).bfloat16())

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return torch._grouped_mm(x, self.weight, offs=ends)


@pytest.mark.parametrize("rows", [8, Dim("rows", min=4, max=16)])
def test_products_of_experts_are_delegated(rows: int | Dim) -> None:
    model, x = Experts(), torch.randn(8, 8).bfloat16()
    ends = torch.tensor([2, 2, 5, 8], dtype=torch.int32)
    shapes = None if isinstance(rows, int) else ({0: rows}, None)
    lowered = lower(export(model, (x, ends), dynamic_shapes=shapes), "XnnpackBackend")
    assert not any("mm" in name for name in lowered.delegation().left)
    groups = zip(x.tensor_split(ends[:-1].tolist()), model.weight, strict=True)
    wanted = torch.cat([part @ weight for part, weight in groups])
    torch.testing.assert_close(load(lowered.buffer).run("forward", x, ends), wanted)


class ConstantAttention(nn.Module):
    """Attention written by hand that reads constants, as a decoder of object queries does."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Buffer(torch.randn(1, 2, 4, 8))

    def forward(self, x: Tensor) -> Tensor:
        q = self.queries
        return (q @ q.mT * 0.35).softmax(-1) @ q + x


def test_attention_of_constants_is_folded() -> None:
    model, x = ConstantAttention(), torch.randn(1, 2, 4, 8)
    lowered = lower(export(model, (x,)), "XnnpackBackend")
    torch.testing.assert_close(load(lowered.buffer).run("forward", x), model(x))
