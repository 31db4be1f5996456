"""Rows that are quantised at run time and read by more than layers of integers, in the runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lowerdeck.emitter import emit
from lowerdeck.lowered_module import to_backend
from lowerdeck.xnnpack import XnnpackPartitioner
from lowerdeck_zoo import official

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not official.available(), reason=official.REASON),
]


def rounded(x: Tensor) -> Tensor:
    """Return a tensor quantised at run time, each row by itself."""
    import torch.ao.quantization.fx._decomposed

    qd = torch.ops.quantized_decomposed
    scale, zero = qd.choose_qparams_per_token_asymmetric(x, torch.int8)
    found = qd.quantize_per_token(x, scale, zero, -128, 127, torch.int8)
    real: Tensor = qd.dequantize_per_token(
        found, scale, zero, -128, 127, torch.int8, torch.float32
    )
    return real


class Net(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def forward(self, x: Tensor, y: Tensor) -> Any:
        rows = rounded(x)
        return {
            "two activations": lambda: rows @ rounded(y).mT,
            "the second of two": lambda: y @ rows.mT,
            "a sum": lambda: rows * 2 + y,
            "a layer of floats": lambda: F.linear(rows, y),
            "a result": lambda: (rows, rows.exp()),
        }[self.way]()


@pytest.mark.parametrize(
    "way", ["two activations", "the second of two", "a sum", "a layer of floats", "a result"]
)
def test_they_are_rounded_as_in_eager(way: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(3, 16), torch.randn(3, 16)
    model = Net(way)
    program = torch.export.export(model, inputs)
    path = tmp_path / "model.pte"
    path.write_bytes(emit(to_backend(program, XnnpackPartitioner())).to_bytes())
    outcome = official.run(path, [official.Call(inputs)])
    assert isinstance(outcome, official.Ran), outcome
    wanted = model(*inputs)
    for found, one in zip(
        outcome.outputs[0], wanted if isinstance(wanted, tuple) else [wanted], strict=True
    ):
        # Rounding changes these by 0.01 and more.
        torch.testing.assert_close(found, one, rtol=1e-5, atol=1e-4)


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
        real: Tensor = torch.ops.quantized_decomposed.dequantize_per_channel(
            found, torch.full([count], 0.02), None, 0, -128, 127, torch.int8
        )
        return real

    def forward(self, ids: Tensor, x: Tensor) -> Any:
        tied, qd = self.weight("tied"), torch.ops.quantized_decomposed
        scale, zero = qd.choose_qparams_per_token_asymmetric(x * 3, torch.int8)
        found = qd.quantize_per_token(x * 3, scale, zero, -128, 127, torch.int8)

        def rows() -> Tensor:
            real: Tensor = qd.dequantize_per_token(
                found, scale, zero, -128, 127, torch.int8, torch.float32
            )
            return real

        return F.embedding(ids, tied), F.linear(rows(), tied), F.linear(rows(), self.weight("own"))


def test_rows_that_one_layer_outside_reads_are_rounded_outside_for_all(tmp_path: Path) -> None:
    rounded(torch.ones(1, 1))  # this makes the operators known
    model = Tied()
    inputs = torch.tensor([1, 2]), torch.randn(3, 16)
    path = tmp_path / "model.pte"
    lowered = to_backend(torch.export.export(model, inputs), XnnpackPartitioner())
    path.write_bytes(emit(lowered).to_bytes())
    outcome = official.run(path, [official.Call(inputs)])
    assert isinstance(outcome, official.Ran), outcome
    for found, one in zip(outcome.outputs[0], model(*inputs), strict=True):
        torch.testing.assert_close(found, one, rtol=1e-5, atol=1e-4)


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
        qd = torch.ops.quantized_decomposed
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
        return F.linear(rounded(x), self.real(), self.bias).relu()


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
    rounded(torch.ones(1, 1))  # this makes the operators known
    model, inputs = Weighted(kind), (torch.randn(5, 64),)
    partitioner = XnnpackPartitioner()
    lowered = to_backend(torch.export.export(model, inputs), partitioner)
    path = tmp_path / "model.pte"
    path.write_bytes(emit(lowered).to_bytes())
    outcome = official.run(path, [official.Call(inputs)])
    assert isinstance(outcome, official.Ran), outcome
    torch.testing.assert_close(outcome.outputs[0][0], model(*inputs), rtol=1e-5, atol=1e-4)
    # Summaries tell what only other kernels can round; zero points cost another layer, no more.
    told = any("groups of" in reason for reason in partitioner.in_float.values())
    left = any("rounds in layers" in reason for reason in partitioner.refused.values())
    assert told == left == kind.startswith("groups")
