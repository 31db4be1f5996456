"""What stands in a region of autocast is of the dtypes that eager gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from lowerdeck.decompose import decompose, explain

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

LINES: dict[str, Callable[[torch.Tensor], Any]] = {
    "einsum": lambda x: torch.einsum("bhqd,bhkd->bhqk", x, x),
    "tensordot": lambda x: torch.tensordot(x, x, dims=([3], [3])),
    "inner": lambda x: torch.inner(x[0, 0], x[0, 0]),
    "kron": lambda x: torch.kron(x[0, 0], x[0, 0]),
    "linear": lambda x: nn.functional.linear(x, x[0, 0]),
    "matmul": lambda x: x @ x.mT,
    "bilinear": lambda x: nn.functional.bilinear(x[0, 0], x[0, 0], x[0]),
    "cosine": lambda x: nn.functional.cosine_similarity(x, x + 1),
    "cross entropy": lambda x: nn.functional.cross_entropy(x[0, 0], x[0, 0].softmax(-1)),
    "attention": lambda x: nn.functional.scaled_dot_product_attention(x, x, x),
    "twice": lambda x: torch.einsum("bhqd,bhkd->bhqk", x, x).softmax(-1) + x.norm(),
}


class Line(nn.Module):
    def __init__(self, line: Callable[[torch.Tensor], Any], dtype: torch.dtype | None) -> None:
        super().__init__()
        self.line = line
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=self.dtype, enabled=self.dtype is not None):
            return self.line(x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, None], ids=str)
@pytest.mark.parametrize("name", LINES)
def test_dtypes_are_those_of_eager(name: str, dtype: torch.dtype | None) -> None:
    model, x = Line(LINES[name], dtype).eval(), torch.rand(2, 2, 3, 3)
    program = torch.export.export(model, (x,))
    assert explain(program).reason is None
    found, expected = decompose(program).module()(x), model(x)
    assert [leaf.dtype for leaf in pytree.tree_leaves(found)] == [
        leaf.dtype for leaf in pytree.tree_leaves(expected)
    ]
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
