"""What is of another kind than expected is one clear error, before anything is looked at."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.export import ExportedProgram, export
from torch.fx import Node

from lowerdeck.decompose import DecomposeError, Rules, decompose, decompose_graph, explain
from lowerdeck_zoo import Of, exported

ATEN = torch.ops.aten
PROGRAM = export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))


@pytest.mark.parametrize("asked", [decompose, explain])
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"exported_program": torch.nn.Linear(2, 2)}, "found a Linear; expected an Exported"),
        ({"table": 3}, "found 3: None in the table"),
        ({"table": {3: torch.relu}}, "found 3: <built-in"),
        ({"table": {ATEN.linear.default: 7}}, "found .*linear.*: 7 in"),
        ({"keep": ATEN.linear.default}, "as keep; expected a collection"),
        ({"keep": [3]}, "keep contains 3"),
        ({"keep": ["aten.linear"]}, "keep contains 'aten.linear'"),
    ],
)
def test_wrong_arguments_are_told(asked: Any, given: dict[str, Any], told: str) -> None:
    with pytest.raises(DecomposeError, match=told):
        asked(**{"exported_program": PROGRAM, **given})


@pytest.mark.parametrize("answer", [lambda: 1 // 0, lambda: torch.ones(2)])
def test_a_function_of_keep_that_fails_is_told_with_the_call(answer: Callable[[], Any]) -> None:
    keep = {ATEN.linear.default: lambda call: answer()}
    assert "node 'linear'" in str(explain(PROGRAM, keep=keep))
    with pytest.raises(DecomposeError, match=r"node 'linear'") as told:
        decompose(PROGRAM, keep=keep)
    assert isinstance(told.value.__cause__, (ZeroDivisionError, RuntimeError))


def test_all_that_torch_takes_as_a_table_is_taken() -> None:
    tables: list[Any] = [None, {}, torch.export.default_decompositions()]
    names = [
        [str(node.target) for node in decompose(PROGRAM, table).graph.nodes if node.args]
        for table in tables
    ]
    assert names[0] == names[2] == ["aten.permute.default", "aten.addmm.default", "output"]
    assert names[1] == ["aten.linear.default", "output"]


class Adding(torch.nn.Module):
    held: torch.Tensor
    passing: torch.Tensor

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.register_buffer("held", torch.ones(3))
        self.register_buffer("passing", torch.ones(3), persistent=False)
        self.plain = torch.ones(3)
        self.writes = writes

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        if self.writes:
            self.held.add_(1)
        return torch.relu(self.linear(x) + y) * self.held + self.passing + self.plain, x.view(-1)


def _relu(program: ExportedProgram) -> Node:
    found: Node = program.graph.find_nodes(op="call_function", target=ATEN.relu.default)[0]
    return found


def _convert_call(program: ExportedProgram) -> tuple[list[str], str]:
    nodes = [f"{n.op} {n.name} {n.target} {n.args} {[*n.meta]}" for n in program.graph.nodes]
    return nodes, str(program.graph_signature)


def _into_method(program: ExportedProgram) -> None:
    _relu(program).op = "call_method"


def _without_arguments(program: ExportedProgram) -> None:
    node = _relu(program)
    node.op, node.args = "call_method", ()


def _after_its_reader(program: ExportedProgram) -> None:
    program.graph.output_node().prepend(_relu(program))


def _one_more_output(program: ExportedProgram) -> None:
    last = program.graph.output_node()
    last.args = ((*last.args[0], _relu(program)),)


def _without_output(program: ExportedProgram) -> None:
    program.graph.erase_node(program.graph.output_node())


def _without_value(program: ExportedProgram) -> None:
    program.graph.find_nodes(op="placeholder")[-1].meta.pop("val")


BROKEN: dict[str, tuple[Callable[[ExportedProgram], Any], str]] = {
    "input_specs": (lambda p: p.graph_signature.input_specs.pop(), "zip"),
    "output_specs": (lambda p: p.graph_signature.output_specs.pop(), "zip"),
    "one more output": (_one_more_output, "zip"),
    "no output": (_without_output, "output"),
    "late": (_after_its_reader, "'mul'.*KeyError: relu"),
    "call_method": (_into_method, "'relu' is a call_method"),
    "call_method of nothing": (_without_arguments, "'relu' is a call_method"),
    "no val": (_without_value, "'y' has no 'val'"),
}


@pytest.mark.parametrize(
    ("name", "writes"), [(name, index % 2 == 0) for index, name in enumerate(BROKEN)]
)
def test_programs_broken_by_hand_are_told(name: str, writes: bool) -> None:
    change, told = BROKEN[name]
    program = export(Adding(writes), (torch.ones(2, 3), torch.ones(3)))
    change(program)
    before = _convert_call(program)
    with pytest.raises(DecomposeError, match=told):
        decompose(program)
    with pytest.raises(DecomposeError, match=told):
        decompose_graph(program, Rules({ATEN.relu.default: lambda x: x.clamp(min=0)}, {}))
    assert _convert_call(program) == before
    try:
        reason = explain(program).reason
    except DecomposeError as error:
        reason = str(error)
    assert reason is not None
    assert re.search(told, reason)


def test_what_fails_at_a_node_names_it() -> None:
    program = exported(Of(lambda x: x.chunk(2, 1)[1] * 2), torch.ones(2, 4))
    (element,) = program.graph.find_nodes(op="call_function", target=operator.getitem)[-1:]
    element.args = (element.args[0], 7)
    with pytest.raises(DecomposeError, match=f"{element.name}.*IndexError"):
        decompose(program)
    assert explain(program).failed


@pytest.mark.parametrize(
    ("operator", "function"),
    [
        (ATEN.sort.default, torch.sort),
        (ATEN.var_mean.correction, torch.var_mean),
        # Functionalization reads the results where they are mutated.
        (ATEN.sort.default, lambda x: [result.add_(1) for result in torch.sort(x)]),
    ],
)
def test_a_rule_with_fewer_results_than_its_operator_is_refused(
    operator: Any, function: Any
) -> None:
    table: Any = {operator: lambda x, *_, **__: (x * 1,)}
    program = exported(Of(function), torch.rand(3))
    with pytest.raises(DecomposeError, match=operator.name().split("::")[1].split(".")[0]):
        decompose(program, table)
    with pytest.raises(DecomposeError):
        decompose_graph(program, Rules.of(table))
