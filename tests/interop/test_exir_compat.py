"""Files made under exir's names, in the official runtime."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import ExportedProgram

from lowerdeck.exir_compat import (
    EdgeCompileConfig,
    SettingWarning,
    emit_program,
    to_edge,
    to_edge_transform_and_lower,
)
from lowerdeck.lowered_module import to_backend
from lowerdeck.serializer import deserialize_pte
from lowerdeck_zoo import Of, assert_close, exported, program

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
    # A function as pass sees ATen operators, as everywhere.
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
    unused = exir.ExecutorchBackendConfig(external_mutable_weights=True)
    with pytest.warns(SettingWarning, match="external_mutable_weights is ignored"):
        to_edge(program).to_executorch(unused)


def operators(manager: Any, method: str = "forward") -> list[str]:
    """Return the operators that a method of a program calls, as they are named in its file."""
    plans = {plan.name: plan for plan in deserialize_pte(manager.buffer).execution_plan}
    return [operator.name for operator in plans[method].operators]


def test_operators_of_loaded_libraries_stay() -> None:
    pytest.importorskip("executorch.kernels.quantized")
    space = torch.ops.quantized_decomposed

    def rounded(x: torch.Tensor) -> torch.Tensor:
        numbers = (0.1, 0, -128, 127, torch.int8)
        steps = space.quantize_per_tensor.default(x, *numbers)
        result: torch.Tensor = space.dequantize_per_tensor.default(steps, *numbers)
        return result

    program = exported(Of(rounded), torch.randn(3, 4))
    names = [f"quantized_decomposed::{name}_per_tensor" for name in ("quantize", "dequantize")]
    assert operators(to_edge(program).to_executorch()) == names
    assert emit_program(program).program.execution_plan[0].operators[0].name == names[0]


def test_a_recipe_of_optimum_executorch_with_one_import_changed(tmp_path: Path) -> None:
    """Quantised layers and embeddings, a pass, and settings that are all exir's."""
    exir = pytest.importorskip("executorch.exir")
    pytest.importorskip("executorch.kernels.quantized")
    quantization = pytest.importorskip("torchao.quantization")
    xnnpack = pytest.importorskip("executorch.backends.xnnpack.partition.xnnpack_partitioner")
    ops, passes = exir.dialects._ops.ops, importlib.import_module("executorch.exir.passes")

    class DropPadding(exir.pass_base.ExportPass):  # type: ignore[misc]
        def call_operator(self, op: Any, args: Any, kwargs: Any, meta: Any) -> Any:
            taken = 2 if op == ops.edge.aten.embedding.default else len(args)
            return super().call_operator(op, args[:taken], kwargs, meta)

    torch.manual_seed(0)
    embedding = torch.nn.Embedding(300, 64, padding_idx=0)
    model = torch.nn.Sequential(embedding, torch.nn.Linear(64, 64)).eval()
    rows, groups = quantization.granularity.PerAxis(0), quantization.granularity.PerGroup(32)
    config = quantization.IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=rows)
    quantization.quantize_(model, config, lambda module, _: module is embedding)
    config = quantization.Int8DynamicActivationIntxWeightConfig(torch.int4, groups)
    quantization.quantize_(model, config)
    ids = torch.tensor([[0, 7, 299]])
    program = torch.export.export(model, (ids,))

    def recipe(lowered_by: Any) -> Any:
        edge = lowered_by(
            {"forward": program},
            partitioner=[xnnpack.XnnpackPartitioner()],
            compile_config=exir.EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
            constant_methods={"get_max_seq_len": 32},
            transform_passes=[DropPadding()],
        )
        planning = passes.MemoryPlanningPass(alloc_graph_input=False)
        config = exir.ExecutorchBackendConfig(
            memory_planning_pass=planning, do_quant_fusion_and_const_prop=True
        )
        return edge.to_executorch(config=config)

    theirs, ours = recipe(exir.to_edge_transform_and_lower), recipe(to_edge_transform_and_lower)
    assert operators(ours) == operators(theirs) == ["quantized_decomposed::embedding_byte"]
    # The embedding alone has 76,800 bytes as floats.
    assert max(len(ours.buffer), len(theirs.buffer)) < 30_000
    results = []
    for made in (theirs, ours):
        (tmp_path / "model.pte").write_bytes(made.buffer)
        # Its library of kernels is not loaded in the worker of other tests.
        command = [sys.executable, "-c", _WITH_QUANTIZED_KERNELS, *map(str, ids[0].tolist())]
        ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        results.append(torch.tensor(json.loads(ran.stdout.splitlines()[-1])))
    assert_close(results[1:], results[:1], atol=1e-5, rtol=0)
    assert_close(results[1:], [model(ids)], atol=0.05, rtol=0)


_WITH_QUANTIZED_KERNELS = """
import sys, torch
import executorch.kernels.quantized
from executorch.runtime import Runtime

method = Runtime.get().load_program("model.pte").load_method("forward")
print(method.execute([torch.tensor([list(map(int, sys.argv[1:]))])])[0].tolist())
"""


def test_an_engine_is_delegated_as_torch_tensorrt_does_it() -> None:
    """A call whose engine is a buffer that the graph reads, and state that stays outside of it."""
    exir = pytest.importorskip("executorch.exir")
    partitioning = pytest.importorskip("executorch.exir.backend.partitioner")
    details = pytest.importorskip("executorch.exir.backend.backend_details")
    tag_constants = importlib.import_module("executorch.exir.backend.utils").tag_constant_data
    xnnpack = pytest.importorskip("executorch.backends.xnnpack.partition.xnnpack_partitioner")

    with torch.library._scoped_library("engines", "DEF") as library:
        library.define("run(Tensor[] inputs, str device, Tensor engine) -> Tensor[]")
        library.impl(
            "run", lambda inputs, *_: [inputs[0] + inputs[1]], "CompositeExplicitAutograd"
        )
        library.impl("run", lambda inputs, *_: [torch.empty_like(inputs[0])], "Meta")

        class EngineBackend(details.BackendDetails):  # type: ignore[misc]
            @staticmethod
            def preprocess(edge_program: Any, compile_specs: Any) -> Any:
                (blob,) = edge_program.state_dict.values()
                return details.PreprocessResult(bytes(blob.numpy()))

        class EnginePartitioner(partitioning.Partitioner):  # type: ignore[misc]
            def partition(self, exported_program: Any) -> Any:
                device = details.CompileSpec("target_device", b"cuda:0")
                for node in exported_program.graph.nodes:
                    if "engines.run" in str(node.target):
                        node.meta["delegation_tag"] = "engine"
                tag_constants(exported_program)
                spec = partitioning.DelegationSpec("EngineBackend", [device])
                return partitioning.PartitionResult(exported_program, {"engine": spec})

        class WithEngine(torch.nn.Module):
            def __init__(self, keeps: bool) -> None:
                super().__init__()
                self.linear = torch.nn.Linear(4, 4).requires_grad_(False)
                self.register_buffer("cache", torch.zeros(2, 4) if keeps else None)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                hidden = self.linear(x)
                if self.cache is not None:
                    hidden = self.cache.add_(hidden)
                result: torch.Tensor = torch.ops.engines.run([x, hidden], "0", x)[0]
                return result.relu() + 1

        def staged(keeps: bool) -> ExportedProgram:
            program = torch.export.export(WithEngine(keeps), (torch.randn(2, 4),))
            engine = torch.arange(64, dtype=torch.uint8)
            program.graph_module.register_buffer("engine", engine)
            program.state_dict["engine"] = engine
            (call,) = (n for n in program.graph.nodes if "engines.run" in str(n.target))
            with program.graph.inserting_before(call):
                read = program.graph.get_attr("engine")
            read.meta["val"] = call.meta["val"][0].fake_mode.from_tensor(engine)
            call.args = (*call.args[:2], read)
            program.graph_module.recompile()
            return program

        edge = to_edge_transform_and_lower(
            {"plain": staged(False), "keeps": staged(True)},
            transform_passes={"plain": [], "keeps": []},
            partitioner={
                "plain": [EnginePartitioner(), xnnpack.XnnpackPartitioner()],
                "keeps": [EnginePartitioner(), xnnpack.XnnpackPartitioner()],
            },
            constant_methods={"get_max_seq_len": 32},
            compile_config=exir.EdgeCompileConfig(_check_ir_validity=False),
        )
        with pytest.warns(
            SettingWarning, match="EngineBackend targets cuda:0, but only CPU memory is planned"
        ):
            file = deserialize_pte(edge.to_executorch(exir.ExecutorchBackendConfig()).buffer)
    for plan in file.execution_plan[:2]:
        assert [one.id for one in plan.delegates].count("EngineBackend") == 1
        assert "XnnpackBackend" in [one.id for one in plan.delegates]
        assert not {operator.name for operator in plan.operators} - {"aten::clone", "aten::add"}
