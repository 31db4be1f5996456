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
from tests.interop import official

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
