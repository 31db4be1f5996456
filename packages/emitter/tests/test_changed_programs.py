"""Programs that were changed after the export into what eager refuses."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import nn

from lowerdeck.emitter import EmitterError, UnsupportedError, emit
from lowerdeck.torch_base import arguments_of

importlib.import_module("torch.ao.quantization.fx._decomposed")
qd = torch.ops.quantized_decomposed


class Dequantizes(nn.Module):
    """A layer whose weight is stored as integers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("integers", torch.ones(8, 4, dtype=torch.int8))
        self.register_buffer("scales", torch.rand(8))
        self.register_buffer("zeros", torch.zeros(8, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return eight numbers for each row, rounded."""
        weight = qd.dequantize_per_channel(
            self.integers, self.scales, self.zeros, 0, -128, 127, torch.int8
        )
        result: torch.Tensor = qd.quantize_per_tensor(
            nn.functional.linear(x, weight), 0.1, 0, -128, 127, torch.int8
        )
        return result


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("scales", torch.rand(7)),
        ("scales", torch.rand(8).double()),
        ("scales", torch.rand(0)),
        ("zeros", torch.zeros(8, dtype=torch.int8)),
        ("zeros", torch.zeros(16, dtype=torch.int64)),
        ("integers", torch.ones(8, 5, dtype=torch.int8)),
    ],
)
def test_a_constant_of_another_kind_than_was_exported_is_refused(
    name: str, tensor: torch.Tensor
) -> None:
    program = torch.export.export(Dequantizes(), (torch.ones(2, 4),))
    program.state_dict[name] = tensor
    message = rf"found .* for '{name}', which .*dequantize_per_channel.* reads; expected"
    with pytest.raises(UnsupportedError, match=message):
        emit(program)


@pytest.mark.parametrize(("name", "value"), [("quant_min", -129), ("quant_max", 300)])
def test_integers_beyond_their_type_are_refused_with_the_node(name: str, value: int) -> None:
    program = torch.export.export(Dequantizes(), (torch.ones(2, 4),))
    (node,) = (one for one in program.graph.nodes if ".quantize_per" in str(one.target))
    node.args = tuple((arguments_of(node) | {name: value}).values())
    with pytest.raises(EmitterError, match=r"quantize_per_tensor.*found integers of .*int8 holds"):
        emit(program)
