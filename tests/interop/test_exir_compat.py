"""Files made under exir's names, in the official runtime."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from lowerdeck.exir_compat import (
    EdgeCompileConfig,
    ExecutorchBackendConfig,
    MemoryPlanningPass,
    to_edge,
    to_edge_transform_and_lower,
)
from lowerdeck.lowered_module import to_backend
from lowerdeck.xnnpack import XnnpackPartitioner
from lowerdeck_zoo import Of, exported, official

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not official.available(), reason=official.REASON),
]
ATEN = torch.ops.aten


class Counting(nn.Module):
    """A layer, and state that is read and changed."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("total", torch.zeros(4))
        self.activation: Any = nn.functional.gelu

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.activation(self.linear(x))
        self.total.add_(y.sum(0))
        return y + self.total


SCALED = Of(lambda x: (x * 2.5).view(4, 3))
"""A number beside a tensor, and a view."""


class Cache(nn.Module):
    cache: Tensor

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(2))
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self.cache, *inputs)


def to_relu(graph_module: GraphModule) -> None:
    for node in graph_module.graph.nodes:
        if node.target is ATEN.gelu.default:
            node.target = ATEN.relu.default


def ran(path: Path, *calls: official.Call) -> list[Any]:
    outcome = official.run(path, calls)
    assert isinstance(outcome, official.Ran), outcome
    return list(outcome.outputs)


@pytest.mark.parametrize("way", ["transformed", "lowered"])
def test_a_model_with_state_gives_eagers_numbers(way: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Counting().eval(), torch.randn(3, 4)
    eager = copy.deepcopy(model)
    program = torch.export.export(model, (x,))
    if way == "lowered":
        manager = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
    else:
        manager = to_edge(program, {"limit": 7}).transform([to_relu])
        eager.activation = torch.relu
    path = tmp_path / "model.pte"
    manager.to_executorch().save(str(path))
    with torch.no_grad():
        for (found,), wanted in zip(
            ran(path, official.Call((x,)), official.Call((x,))), (eager(x), eager(x)), strict=True
        ):
            torch.testing.assert_close(found, wanted)


def test_state_of_one_name_is_shared_where_asked(tmp_path: Path) -> None:
    programs = {
        "fill": exported(Cache(lambda held, x: held.copy_(x) + 0), torch.ones(2)),
        "read": exported(Cache(lambda held: held + 0)),
    }
    config = ExecutorchBackendConfig(
        memory_planning_pass=MemoryPlanningPass(share_mutable_buffers=True)
    )
    path = tmp_path / "model.pte"
    to_edge(programs).to_executorch(config).save(str(path))
    calls = [official.Call((torch.ones(2),), "fill"), official.Call((), "read")]
    outcome = official.run(path, calls, shared_arenas=True)
    assert isinstance(outcome, official.Ran), outcome
    assert outcome.outputs[1][0].sum() == 2


def test_callers_who_know_the_edge_dialect_see_it_and_the_file_is_the_same() -> None:
    exir_ops = pytest.importorskip("executorch.exir.dialects._ops").ops
    verifier = pytest.importorskip("executorch.exir.verification.verifier")
    torch.manual_seed(0)
    program = exported(SCALED, torch.randn(3, 4))
    plain = to_edge(program, compile_config=EdgeCompileConfig(_use_edge_ops=False))
    expected = plain.to_executorch().buffer
    assert plain.exported_program().dialect == "ATEN"
    seen = to_edge(program)
    shown = seen.exported_program()
    assert shown.dialect == "EDGE"
    verifier.EXIREdgeDialectVerifier()(shown.graph_module)
    calls = {node.target: node.name for node in shown.graph.nodes if node.op == "call_function"}
    assert calls[exir_ops.edge.aten.mul.Tensor] == "aten_mul_tensor"
    assert calls[exir_ops.edge.aten.view_copy.default] == "aten_view_copy_default"
    assert seen.exported_program() is shown
    # Its number is a number again, and its copy a view.
    assert seen.to_executorch().buffer == expected
    torch.testing.assert_close(shown.module()(torch.ones(3, 4)), SCALED(torch.ones(3, 4)))
    # What a caller changes stays changed.
    for node in shown.graph.nodes:
        if node.target is exir_ops.edge.aten.mul.Tensor:
            node.target = exir_ops.edge.aten.add.Tensor
    names = [
        one.name for one in seen.to_executorch().executorch_program.execution_plan[0].operators
    ]
    assert names == ["aten::add"]
    # A function as pass sees torch's operators, as everywhere.
    found: list[Any] = []
    seen.transform([lambda gm: found.extend(n.target for n in gm.graph.nodes)])
    assert ATEN.view_copy.default in found or ATEN.view.default in found


def test_programs_are_in_exirs_classes_for_exirs_tools() -> None:
    schema = pytest.importorskip("executorch.exir.schema")
    printing = pytest.importorskip("executorch.exir.print_program")
    reading = pytest.importorskip("executorch.exir._serialize._program")
    made = to_edge(torch.export.export(Counting().eval(), (torch.ones(3, 4),))).to_executorch()
    program: Any = made.executorch_program
    assert type(program) is schema.Program
    printing.pretty_print(program)
    (plan,) = program.execution_plan
    kinds = {type(one.instr_args) for one in plan.chains[0].instructions}
    assert kinds <= {schema.KernelCall, schema.MoveCall}
    read = reading.deserialize_pte_binary(made.buffer).program
    assert read.execution_plan == program.execution_plan
    assert read.constant_buffer == program.constant_buffer
    output: Any = made._emitter_output
    assert type(output.mutable_data) is type(None)


def test_errors_are_those_that_exirs_callers_catch() -> None:
    partitioning = pytest.importorskip("executorch.exir.backend.partitioner")
    exir_ops = pytest.importorskip("executorch.exir.dialects._ops").ops

    class Edits(partitioning.Partitioner):  # type: ignore[misc]
        def partition(self, exported_program: Any) -> Any:
            for node in exported_program.graph.nodes:
                if node.target is exir_ops.edge.aten.mul.Tensor:
                    node.target = exir_ops.edge.aten.add.Tensor
            return partitioning.PartitionResult(exported_program, {})

    manager = to_edge(exported(SCALED, torch.randn(3, 4)))
    with pytest.raises(AssertionError, match="Edits changed the graph"):
        manager.to_backend(Edits())
    with pytest.raises(NotImplementedError, match="Backend NoSuchOne was not found"):
        to_backend("NoSuchOne", manager.exported_program(), [])
