"""Of programs of fixed sizes each node is torch's: its name, its place and what it knows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lowerdeck.decompose import decompose

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The tensor attributes:UserWarning"),
]

# Not seq_nr, by which autograd numbers what it records while a whole program is traced.
_KNOWN = (
    *("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn"),
    *("original_aten", "tensor_meta", "val", "custom"),
)


class _Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.conv = nn.Linear(8, 8), nn.Conv1d(2, 2, 3)

    def forward(self, x: torch.Tensor) -> Any:
        y = torch.einsum("abc,abd->acd", x, self.linear(x)).softmax(-1)
        z = torch.stack([*y.chunk(2, 1)]).flatten(1) + torch.arange(64)
        return (
            z,
            nn.functional.interpolate(self.conv(x), scale_factor=2.0),
            x.to(torch.float64).std(),
        )


_PROGRAMS: dict[str, tuple[nn.Module, torch.Tensor]] = {
    "several": (_Several(), torch.randn(2, 2, 8)),
    "recurrent": (nn.LSTM(8, 4, 2, bidirectional=True).eval(), torch.randn(3, 2, 8)),
    "attending": (nn.TransformerEncoderLayer(8, 2, 16).eval(), torch.randn(3, 2, 8)),
    "trained": (nn.Sequential(nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2)), torch.randn(2, 2, 5, 5)),
}


@pytest.mark.parametrize("name", _PROGRAMS)
def test_each_node_is_torchs(name: str) -> None:
    model, x = _PROGRAMS[name]
    program = torch.export.export(model, (x,))
    found, expected = decompose(program).graph.nodes, program.run_decompositions().graph.nodes
    assert [node.name for node in found] == [node.name for node in expected]
    for one, other in zip(found, expected, strict=True):
        if one.op != "call_function":
            continue
        for key in _KNOWN:
            assert str(one.meta.get(key)) == str(other.meta.get(key)), (one, key)
        sources = [
            [source.name for source in node.meta.get("from_node", ())] for node in (one, other)
        ]
        assert sources[0] == sources[1], one
