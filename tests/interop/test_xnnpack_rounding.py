"""Rows that are quantised at run time and read by more than layers of integers, in the runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lowerdeck.xnnpack import XnnpackPartitioner
from lowerdeck_zoo import Of, official
from tests.interop.runs import check

from quantized_cases import by_row, qd  # isort: skip

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not official.available(), reason=official.REASON),
]
WAYS: dict[str, Any] = {
    "two activations": lambda x, y: by_row(x) @ by_row(y).mT,
    "the second of two": lambda x, y: y @ by_row(x).mT,
    "a sum": lambda x, y: by_row(x) * 2 + y,
    "a layer of floats": lambda x, y: F.linear(by_row(x), y),
    "a result": lambda x, y: (rows := by_row(x), rows.exp()),
}


@pytest.mark.parametrize("way", WAYS)
def test_they_are_rounded_as_in_eager(way: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    # Rounding changes these by 0.01 and more.
    inputs = torch.randn(3, 16), torch.randn(3, 16)
    check(Of(WAYS[way]), inputs, folder=tmp_path, tolerance=1e-4)


class Tied(nn.Module):
    """Two layers read one quantised tensor, and one's weight is also read by an embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name, rows in (("tied", 10), ("own", 6)):
            self.register_buffer(name, torch.randint(-128, 128, (rows, 16), dtype=torch.int8))

    def weight(self, name: str) -> Tensor:
        found = self.get_buffer(name)
        count = found.shape[0]
        real: Tensor = qd.dequantize_per_channel(
            found, torch.full([count], 0.02), None, 0, -128, 127, torch.int8
        )
        return real

    def forward(self, ids: Tensor, x: Tensor) -> Any:
        tied = self.weight("tied")
        scale, zero = qd.choose_qparams_per_token_asymmetric(x * 3, torch.int8)
        found = qd.quantize_per_token(x * 3, scale, zero, -128, 127, torch.int8)

        def rows() -> Tensor:
            real: Tensor = qd.dequantize_per_token(
                found, scale, zero, -128, 127, torch.int8, torch.float32
            )
            return real

        return F.embedding(ids, tied), F.linear(rows(), tied), F.linear(rows(), self.weight("own"))


def test_rows_that_one_layer_outside_reads_are_rounded_outside_for_all(tmp_path: Path) -> None:
    check(Tied(), (torch.tensor([1, 2]), torch.randn(3, 16)), folder=tmp_path, tolerance=1e-4)


class Weighted(nn.Module):
    """A layer on rounded rows, whose weight is integers that the runtime does not take as such."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        low, high = (-8, 8) if "4 bits" in kind else (-128, 128)
        self.register_buffer("weight", torch.randint(low, high, (6, 64), dtype=torch.int8))
        self.register_buffer("bias", torch.randn(6))
        if kind == "zero points":
            zeros = torch.tensor([-128, 127, 0, 5, -90, 60])
            self.weight[0, 0], self.weight[1, 0] = 127, -128
        else:
            zeros = torch.zeros(6, 4 if "16" in kind else 2, dtype=torch.int64)
        if kind == "zero points of groups of 4 bits":
            zeros = torch.tensor([[-8, 7], [0, 3], [-2, 1], [5, -8], [0, 0], [7, 7]])
            self.weight[0] = 7
            self.weight[5] = 7  # nothing but 0 is left of this row
        self.register_buffer("zeros", zeros)
        self.register_buffer("scales", torch.rand(zeros.shape).bfloat16().float() / 50 + 2**-9)

    def real(self) -> Tensor:
        low, high = (-8, 7) if "4 bits" in self.kind else (-128, 127)
        args = (self.weight, self.scales.bfloat16().float(), self.zeros)
        if self.kind == "zero points":
            found: Tensor = qd.dequantize_per_channel(*args, 0, low, high, torch.int8)
            return found
        size = 64 // self.zeros.shape[1]
        per_group = (*args, low, high, torch.int8, size, torch.float32)
        grouped: Tensor = qd.dequantize_per_channel_group(*per_group)
        return grouped

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(by_row(x), self.real(), self.bias).relu()


@pytest.mark.parametrize(
    "kind",
    [
        *("groups of 16 of 4 bits", "groups of 32 of 8 bits"),
        *("zero points", "zero points of groups of 4 bits"),
    ],
)
def test_layers_of_weights_that_the_runtime_lacks_round_as_in_eager(
    kind: str, tmp_path: Path
) -> None:
    partitioner, inputs = XnnpackPartitioner(), (torch.randn(5, 64),)
    check(Weighted(kind), inputs, folder=tmp_path, tolerance=1e-4, partitioner=partitioner)
    # Summaries tell what only other kernels can round; zero points cost another layer, no more.
    told = any("groups of" in reason for reason in partitioner.in_float.values())
    left = any("rounds in layers" in reason for reason in partitioner.refused.values())
    assert told == left == kind.startswith("groups")
