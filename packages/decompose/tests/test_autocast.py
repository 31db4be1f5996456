"""What stands in a region of autocast is of the dtypes that eager gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram

from lowerdeck.decompose import can_keep, decompose, explain
from lowerdeck.torch_base import OpOverload, graphs_of, pytree

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

ATEN = torch.ops.aten
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
    "mixed": lambda x: torch.einsum("bhqd,bhkd->bhqk", x @ x.mT, x),
    "matrix power": lambda x: torch.linalg.matrix_power(x, 3),
    "multi dot": lambda x: torch.linalg.multi_dot([x[0, 0]] * 3),
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


def _every(program: ExportedProgram) -> list[OpOverload]:
    called = {
        node.target for graph in graphs_of(program.graph_module) for node in graph.graph.nodes
    }
    return [target for target in called if can_keep(target, some=True)]


WAYS: dict[str, Callable[[ExportedProgram], dict[str, Any]]] = {
    "core": lambda program: {},
    "all composites stay": lambda program: {"table": {}},
    "all stays": lambda program: {"keep": _every(program)},
    "each call stays": lambda program: {"keep": dict.fromkeys(_every(program), lambda call: True)},
}


@pytest.mark.parametrize(
    ("way", "dtype"),
    [
        ("core", torch.float16),
        ("core", None),
        *((way, torch.bfloat16) for way in WAYS),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", LINES)
def test_dtypes_are_those_of_eager(name: str, dtype: torch.dtype | None, way: str) -> None:
    model, x = Line(LINES[name], dtype).eval(), torch.rand(2, 2, 3, 3)
    program = torch.export.export(model, (x,))
    told = WAYS[way](program)
    assert explain(program, **told).reason is None
    made = decompose(program, **told)
    found, expected = made.module()(x), model(x)
    assert [leaf.dtype for leaf in pytree.tree_leaves(found)] == [
        leaf.dtype for leaf in pytree.tree_leaves(expected)
    ]
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    said = [node.meta["val"].dtype for node in made.graph.output_node().args[0]]
    assert said == [leaf.dtype for leaf in pytree.tree_leaves(found)]


def test_a_call_that_stays_in_a_region_is_cast_as_one_outside_is_not() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                inside = self.linear(x)
            return inside, self.linear(x), self.linear(x + 1)

    program = torch.export.export(Both().eval(), (torch.rand(2, 3),))
    calls = program.graph.find_nodes(op="call_function", target=ATEN.linear.default)
    made = decompose(program, keep={ATEN.linear.default: lambda call: call is not calls[-1]})
    kept = made.graph.find_nodes(op="call_function", target=ATEN.linear.default)
    assert [node.meta["val"].dtype for node in kept] == [torch.bfloat16, torch.float32]
    assert len(made.graph.find_nodes(op="call_function", target=ATEN.addmm.default)) == 1
