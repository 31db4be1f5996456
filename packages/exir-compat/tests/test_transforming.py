"""Passes of every form change programs, and what is no pass is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.fx.passes.infra.pass_base import PassBase, PassResult
from torch.fx.passes.infra.pass_manager import PassManager

from lowerdeck.exir_compat import (
    ExecutorchBackendConfig,
    TransformError,
    to_edge,
    to_edge_transform_and_lower,
)
from lowerdeck.lowered_module.testing import RunPartitioner

aten = torch.ops.aten


def swap(graph_module: GraphModule) -> None:
    for node in graph_module.graph.nodes:
        if node.target is aten.gelu.default:
            node.target = aten.relu.default


class Swap(PassBase):
    def call(self, graph_module: GraphModule) -> PassResult:
        swap(graph_module)
        return PassResult(graph_module, True)


class SwapInProgram:
    """Returns a program; its annotation says that it takes one."""

    def __call__(self, exported_program: ExportedProgram) -> ExportedProgram:
        swap(exported_program.graph_module)
        return exported_program


def in_a_result(exported_program: ExportedProgram) -> SimpleNamespace:
    swap(exported_program.graph_module)
    return SimpleNamespace(exported_program=exported_program)


def anew(graph_module: GraphModule) -> GraphModule:
    """A new graph whose inputs are called otherwise."""
    swap(graph_module)
    graph = torch.fx.Graph()
    found: dict[Any, Any] = {}
    for node in graph_module.graph.nodes:
        found[node] = graph.node_copy(node, found.__getitem__)
        if node.op == "placeholder":
            found[node].name = f"renamed_{node.name}"
    return GraphModule(graph_module, graph)


PASSES = {
    "in place": swap,
    "PassBase": Swap(),
    "program": SwapInProgram(),
    "result of a program": in_a_result,
    "anew": anew,
    "manager": PassManager([Swap()]),
    "several": [Swap(), swap],
    "by method": {"forward": [Swap()]},
}


def targets(program: ExportedProgram) -> set[Any]:
    return {node.target for node in program.graph.nodes if node.op == "call_function"}


@pytest.mark.parametrize("form", PASSES)
def test_passes_change_a_copy(
    counting: Any, exported: ExportedProgram, inputs: tuple[torch.Tensor], form: str
) -> None:
    manager = to_edge(exported)
    changed = manager.transform(PASSES[form])
    assert aten.gelu.default in targets(manager.exported_program())
    assert aten.gelu.default not in targets(changed.exported_program())
    assert changed.to_executorch().methods == {"forward"}
    program = changed.exported_program().module()
    with torch.no_grad():
        for _ in range(2):
            y = counting.linear(*inputs).relu()
            counting.total.add_(y.sum(0))
            torch.testing.assert_close(program(*inputs), y + counting.total)


def test_a_pass_can_be_a_method_of_a_built_in_object(exported: ExportedProgram) -> None:
    seen: list[Any] = []
    to_edge(exported).transform([seen.append])
    assert [type(one).__name__ for one in seen] == ["GraphModule"]


def test_passes_run_before_partitioners_and_before_emission(exported: ExportedProgram) -> None:
    lowered = to_edge_transform_and_lower(
        exported, [Swap()], RunPartitioner(lambda node: node.target is aten.relu.default)
    )
    assert aten.gelu.default not in targets(lowered.exported_program())
    assert torch.ops.higher_order.executorch_call_delegate in targets(lowered.exported_program())
    made = to_edge(exported).to_executorch(ExecutorchBackendConfig(passes=[Swap()]))
    names = {one.name for one in made.executorch_program.execution_plan[0].operators}
    assert "aten::relu" in names
    assert "aten::gelu" not in names


def drop_output(graph_module: Any) -> None:
    output = graph_module.graph.output_node()
    output.args = (output.args[0][:1],)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda graph_module: 3, "returned a int"),
        (drop_output, "after pass drop_output the graph has"),
    ],
)
def test_what_is_no_pass_is_refused(exported: ExportedProgram, given: Any, message: str) -> None:
    with pytest.raises(TransformError, match=message):
        to_edge(exported).transform([given])
