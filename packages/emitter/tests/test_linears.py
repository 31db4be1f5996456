"""Decomposed linear layers are one kernel again; ``tests/interop`` compares their numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export

from lowerdeck.decompose import decompose
from lowerdeck.emitter import emit

X, W, B = torch.randn(2, 3), torch.randn(4, 3), torch.randn(4)


class Of(nn.Module):
    def __init__(self, function: Callable[..., Any], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(W.to(dtype), requires_grad=False)
        self.bias = nn.Parameter(B.to(dtype), requires_grad=False)

    def forward(self, x: Tensor) -> Any:
        return self.function(x, self.weight, self.bias)


def kernels(function: Callable[..., Any], dtype: torch.dtype = torch.float32) -> Counter[str]:
    program = decompose(export(Of(function, dtype), (X.to(dtype),)))
    plan = emit(program).program.execution_plan[0]
    calls = [step.instr_args for step in plan.chains[0].instructions]
    names = [plan.operators[call.op_index].name for call in calls if hasattr(call, "op_index")]
    return Counter(name.removeprefix("aten::") for name in names)


@pytest.mark.parametrize(
    "function",
    [
        nn.functional.linear,
        lambda x, w, b: nn.functional.linear(x, w),
        lambda x, w, b: torch.addmm(b, x, w.t()),
        lambda x, w, b: x @ w.transpose(-1, -2),
        lambda x, w, b: x @ w.permute(1, 0),
        lambda x, w, b: x @ w.transpose(0, 1),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_product_by_a_transposed_weight_is_a_linear_layer(
    function: Callable[..., Any], dtype: torch.dtype
) -> None:
    assert kernels(function, dtype) == {"linear": 1}


def test_layers_on_rows_of_more_dimensions_copy_no_weight() -> None:
    found = kernels(lambda x, w, b: nn.functional.linear(x.reshape(1, 2, 3), w, b))
    assert found["linear"] == 1
    assert not found["permute_copy"]
    assert not found["addmm"]


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda x, w, b: torch.addmm(b, x, w.t(), beta=2), {"addmm": 1}),
        (lambda x, w, b: torch.addmm(b[:1], x, w.t()), {"addmm": 1}),
        (lambda x, w, b: x @ w.permute(0, 1)[:3, :], {"mm": 1}),
        (lambda x, w, b: x.t() @ x, {"permute_copy": 1, "mm": 1}),
    ],
)
def test_other_products_stay(function: Callable[..., Any], found: dict[str, int]) -> None:
    kept = kernels(function)
    assert {name: kept[name] for name in found} == found
    assert not kept["linear"]


def test_a_transpose_that_is_read_stays() -> None:
    found = kernels(lambda x, w, b: (x @ x.t(), x.t() * 2))
    assert found == {"linear": 1, "permute_copy": 1, "mul": 1}


def test_any_number_of_rows() -> None:
    rows = Dim("rows", min=1, max=8)
    program = export(Of(nn.functional.linear), (X,), dynamic_shapes=({0: rows},))
    (operator,) = emit(decompose(program)).program.execution_plan[0].operators
    assert operator.name == "aten::linear"
