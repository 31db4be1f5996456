"""Files made under exir's names, in the official runtime."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lowerdeck.exir_compat import (
    EdgeCompileConfig,
    ExecutorchBackendConfig,
    SettingError,
    to_edge,
)
from lowerdeck.lowered_module import to_backend
from lowerdeck_zoo import Of, exported, program

ATEN = torch.ops.aten


SCALED = Of(lambda x: (x * 2.5).view(4, 3))
"""A number beside a tensor, and a view."""


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
    made = to_edge(program("kv_cache").export_anew()).to_executorch()
    found: Any = made.executorch_program
    assert type(found) is schema.Program
    printing.pretty_print(found)
    (plan,) = found.execution_plan
    kinds = {type(one.instr_args) for one in plan.chains[0].instructions}
    assert kinds <= {schema.KernelCall, schema.MoveCall}
    read = reading.deserialize_pte_binary(made.buffer).program
    assert read.execution_plan == found.execution_plan
    assert read.constant_buffer == found.constant_buffer
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


def test_settings_of_exirs_class_are_taken() -> None:
    exir = pytest.importorskip("executorch.exir")
    passes = pytest.importorskip("executorch.exir.passes")
    program = exported(SCALED, torch.randn(3, 4))
    expected = to_edge(program).to_executorch().buffer
    assert to_edge(program).to_executorch(exir.ExecutorchBackendConfig()).buffer == expected
    planning = passes.MemoryPlanningPass(alloc_graph_input=False)
    config = exir.ExecutorchBackendConfig(memory_planning_pass=planning, emit_stacktrace=True)
    method = to_edge(program).to_executorch(config).emitted.program.execution_plan[0]
    assert method.values[method.inputs[0]].val.allocation_info is None
    refused = exir.ExecutorchBackendConfig(external_mutable_weights=True)
    with pytest.raises(SettingError, match="external_mutable_weights is True"):
        to_edge(program).to_executorch(refused)


def test_custom_kernels_keep_quantized_operators() -> None:
    pytest.importorskip("executorch.kernels.quantized")
    space = torch.ops.quantized_decomposed

    def rounded(x: torch.Tensor) -> torch.Tensor:
        numbers = (0.1, 0, -128, 127, torch.int8)
        steps = space.quantize_per_tensor.default(x, *numbers)
        result: torch.Tensor = space.dequantize_per_tensor.default(steps, *numbers)
        return result

    names = [f"quantized_decomposed::{name}_per_tensor" for name in ("quantize", "dequantize")]
    config = ExecutorchBackendConfig(custom_kernels={f"{name}.out" for name in names})
    program = exported(Of(rounded), torch.randn(3, 4))
    for settings, is_kept in ((config, True), (None, False)):
        emitted = to_edge(program).to_executorch(settings).emitted
        operators = [operator.name for operator in emitted.program.execution_plan[0].operators]
        assert (operators == names) == is_kept
