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
from lowerdeck_zoo import Of, exported

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

ATEN = torch.ops.aten
LINES: tuple[Callable[[torch.Tensor], Any], ...] = (
    lambda x: torch.einsum("bhqd,bhkd->bhqk", x, x),
    lambda x: torch.tensordot(x, x, dims=([3], [3])),
    lambda x: torch.inner(x[0, 0], x[0, 0]),
    lambda x: torch.kron(x[0, 0], x[0, 0]),
    lambda x: nn.functional.linear(x, x[0, 0]),
    lambda x: x @ x.mT,
    lambda x: nn.functional.bilinear(x[0, 0], x[0, 0], x[0]),
    lambda x: nn.functional.cosine_similarity(x, x + 1),
    lambda x: nn.functional.cross_entropy(x[0, 0], x[0, 0].softmax(-1)),
    lambda x: nn.functional.scaled_dot_product_attention(x, x, x),
    lambda x: torch.einsum("bhqd,bhkd->bhqk", x @ x.mT, x),
    lambda x: torch.linalg.matrix_power(x, 3),
    lambda x: torch.linalg.multi_dot([x[0, 0]] * 3),
    lambda x: torch.einsum("bhqd,bhkd->bhqk", x, x).softmax(-1) + x.norm(),
)


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
def test_dtypes_are_those_of_eager(dtype: torch.dtype | None, way: str) -> None:
    def forward(x: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            return [line(x) for line in LINES]

    model, x = Of(forward), torch.rand(2, 2, 3, 3)
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
    def both(own: Any, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = own.linear(x)
        return inside, own.linear(x), own.linear(x + 1)

    program = exported(Of(both, linear=nn.Linear(3, 3)), torch.rand(2, 3))
    calls = program.graph.find_nodes(op="call_function", target=ATEN.linear.default)
    made = decompose(program, keep={ATEN.linear.default: lambda call: call is not calls[-1]})
    kept = made.graph.find_nodes(op="call_function", target=ATEN.linear.default)
    assert [node.meta["val"].dtype for node in kept] == [torch.bfloat16, torch.float32]
    assert len(made.graph.find_nodes(op="call_function", target=ATEN.addmm.default)) == 1
