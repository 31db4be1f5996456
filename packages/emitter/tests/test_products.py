"""Batched products copy no matrices; ``tests/interop`` compares their numbers."""

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

ROWS, WIDE, LONG = 3, 40, 50
Q, K, V = (
    torch.randn(1, 4, ROWS, WIDE),
    torch.randn(1, 2, LONG, WIDE),
    torch.randn(1, 2, LONG, WIDE),
)


class Of(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return self.function(q, k, v)


def repeated(x: Tensor, times: int = 2) -> Tensor:
    """Repeat heads as transformers does."""
    batch, heads, length, width = x.shape
    more = x[:, :, None].expand(batch, heads, times, length, width)
    return more.reshape(batch, heads * times, length, width)


def scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q @ repeated(k).transpose(-1, -2)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(q, repeated(k), repeated(v))


def copies(
    function: Callable[..., Any],
    inputs: tuple[Tensor, ...] = (Q, K, V),
    rows: Any = None,
) -> Counter[tuple[str, int]]:
    """Return the copies that a program makes, by their kernels and how many numbers they copy."""
    shapes = None if rows is None else ({2: rows}, None, None)
    plan = emit(
        decompose(export(Of(function), inputs, dynamic_shapes=shapes))
    ).program.execution_plan[0]
    found: Counter[tuple[str, int]] = Counter()
    for step in plan.chains[0].instructions:
        call: Any = step.instr_args
        name = plan.operators[call.op_index].name if hasattr(call, "op_index") else ""
        if name.endswith(("_copy", "clone", "index")):
            out: Any = plan.values[call.args[-1]]
            found[name.removeprefix("aten::"), torch.Size(out.val.sizes).numel()] += 1
    return found


@pytest.mark.parametrize("rows", [None, Dim("rows", min=1, max=LONG)])
def test_attention_copies_no_keys_and_no_values(rows: Any) -> None:
    most = 4 * (ROWS if rows is None else LONG)
    assert set(copies(attention, rows=rows)) == {
        ("permute_copy", most * WIDE),
        ("permute_copy", most * LONG),
    }


@pytest.mark.parametrize("length", [LONG, LONG + 1])
def test_heads_of_any_length_are_read_where_they_lie(length: int) -> None:
    k, v = torch.randn(1, 2, length, WIDE), torch.randn(1, 2, length, WIDE)
    assert set(copies(attention, (Q, k, v))) == {
        ("permute_copy", 4 * ROWS * WIDE),
        ("permute_copy", 4 * ROWS * length),
    }


def test_what_is_cut_across_repetitions_is_copied() -> None:
    """Three heads twice as two threes: the batch of a product holds no head with its copy."""

    def across(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        repeated_twice = v[:, :, None].expand(1, 3, 2, LONG, WIDE)
        return q @ repeated_twice.reshape(2, 3, LONG, WIDE)

    inputs = (torch.randn(2, 3, ROWS, LONG), K, torch.randn(1, 3, LONG, WIDE))
    assert ("expand_copy", 6 * LONG * WIDE) in copies(across, inputs)


@pytest.mark.parametrize(
    "function",
    [
        scores,
        lambda q, k, v: q @ k.repeat_interleave(2, 1).mT,
        lambda q, k, v: q @ repeated(k * 2).mul(3).transpose(2, 3).mul(2),
        lambda q, k, v: q @ repeated(k.mT.contiguous() + 1),
        lambda q, k, v: q[:, :, :, :1].expand(1, 4, ROWS, LONG) @ repeated(v),
    ],
)
def test_what_is_repeated_is_not_written_out(function: Callable[..., Any]) -> None:
    assert all(size < 4 * LONG * WIDE for _, size in copies(function))


def test_rows_that_are_more_than_the_matrices_leave_them_transposed() -> None:
    many = torch.randn(1, 4, 4 * LONG, WIDE)
    assert copies(scores, (many, K, V)) == {("permute_copy", 2 * LONG * WIDE): 1}
    # So it is where they vary, and each number that is copied is multiplied few times.
    rows = Dim("rows", min=1, max=LONG)
    narrow = copies(scores, (Q[..., :8], K[..., :8], V), rows)
    assert narrow == {("permute_copy", 2 * LONG * 8): 1}


def read_twice(q: Tensor, k: Tensor, v: Tensor) -> Any:
    many = repeated(k)
    return q @ many.mT, many


def tiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q @ k[:, None].expand(1, 2, 2, LONG, WIDE).reshape(1, 4, LONG, WIDE).mT


def rows_repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q @ k[:, :1, :1].expand(1, 4, LONG, WIDE).mT


@pytest.mark.parametrize("function", [read_twice, tiled, rows_repeated])
def test_what_is_no_matrix_repeated_for_one_product_is_written_out(
    function: Callable[..., Any],
) -> None:
    assert ("expand_copy", 4 * LONG * WIDE) in copies(function)


def test_a_transpose_that_two_products_read_stays() -> None:
    def two(q: Tensor, k: Tensor, v: Tensor) -> Any:
        keys = k.mT.contiguous()
        return q[:, :2] @ keys, q[:, 2:] @ keys

    assert copies(two)["permute_copy", 2 * LONG * WIDE] == 1


def test_of_large_constants_the_other_operand_is_transposed() -> None:
    class Known(nn.Module):
        def __init__(self, length: int) -> None:
            super().__init__()
            self.k = nn.Buffer(torch.randn(2, length, WIDE))

        def forward(self, q: Tensor) -> Tensor:
            return q @ self.k.mT

    def sizes(length: int) -> list[int]:
        plan = emit(decompose(export(Known(length), (Q[0, :2],)))).program.execution_plan[0]
        calls: list[Any] = [step.instr_args for step in plan.chains[0].instructions]
        outs: list[Any] = [plan.values[call.args[-1]] for call in calls]
        return [torch.Size(out.val.sizes).numel() for out in outs]

    product = 2 * ROWS * LONG
    assert sizes(LONG) == [2 * ROWS * WIDE, product, product]
    # Small ones are transposed ahead of time.
    assert sizes(2) == [2 * ROWS * 2]
