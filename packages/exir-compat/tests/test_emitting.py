"""What was emitted, under the names by which exir's tools ask for it."""

from __future__ import annotations

import struct
from io import StringIO

import torch
from torch.export import ExportedProgram

from lowerdeck.exir_compat import ExecutorchBackendConfig, emit_program, to_edge
from lowerdeck.lowered_module import BackendDetails, CompileSpec, PreprocessResult, to_backend
from lowerdeck_zoo import Of


class _Traced(BackendDetails):
    """Tells of all its nodes under one number."""

    @staticmethod
    def preprocess(
        edge_program: ExportedProgram, compile_specs: list[CompileSpec]
    ) -> PreprocessResult:
        handles = [n.meta["debug_handle"] for n in edge_program.graph.nodes if n.op in _NUMBERED]
        return PreprocessResult(b"", debug_handle_map={1: tuple(handles)})


_NUMBERED = ("call_function", "get_attr")


def test_programs_are_emitted_in_the_order_of_their_names(exported: ExportedProgram) -> None:
    found = emit_program({"b": exported, "a": exported}, prim_getters={"limit": 7})
    assert [plan.name for plan in found.program.execution_plan] == ["a", "b", "limit"]
    assert emit_program(exported).program.execution_plan[0].name == "forward"


def test_handles_are_numbers_and_those_of_delegates_lists(exported: ExportedProgram) -> None:
    made = to_edge(exported).to_executorch()
    instructions = made.executorch_program.execution_plan[0].chains[0].instructions
    handles = made.debug_handle_map["forward"]
    assert handles.keys() == set(range(len(instructions)))
    assert all(isinstance(one, int) for one in handles.values())
    assert made.instruction_id_to_num_outs_map == {"forward": {}}


def test_results_of_delegates_are_counted(inputs: tuple[torch.Tensor]) -> None:
    two = Of(lambda x: (x + 1, x * 2))
    program = to_edge(torch.export.export(two, inputs)).exported_program()
    wrapped = torch.nn.Sequential(to_backend("_Traced", program, []))
    made = to_edge(torch.export.export(wrapped, inputs)).to_executorch()
    assert made.instruction_id_to_num_outs_map == {"forward": {0: 2}}
    assert made.debug_handle_map == {"forward": {0: [1, 2]}}
    assert made.delegate_map["forward"][0] == {"name": "_Traced", "delegate_map": {1: (1, 2)}}


def test_constants_outside_are_listed_once(inputs: tuple[torch.Tensor]) -> None:
    # A weight of ones and a bias of zeros.
    model = torch.nn.LayerNorm(4).requires_grad_(False)
    model.bias.fill_(1)
    config = ExecutorchBackendConfig(external_constants=True)
    program = torch.export.export(model, inputs)
    output = to_edge(program).to_executorch(config)._emitter_output
    assert output.external_constant_map == {"_default_external_constant": {"weight": 0, "bias": 0}}
    assert output.external_constant_buffer == [struct.pack("<4f", 1, 1, 1, 1)]
    assert output.mutable_data is None


def test_initial_values_of_state_are_listed() -> None:
    state = Of(lambda self, x: self.state.add_(x) + x, state=torch.ones(2))
    program = torch.export.export(state, (torch.ones(2),))
    output = to_edge(program).to_executorch()._emitter_output
    assert output.mutable_data is not None
    assert bytes(output.mutable_data[1].storage) == struct.pack("<2f", 1, 1)


def test_programs_are_printed(exported: ExportedProgram) -> None:
    out = StringIO()
    to_edge(exported).to_executorch().dump_executorch_program(out=out)
    assert "aten::gelu" in out.getvalue()


def test_delegates_inside_delegates_have_debug_handles(inputs: tuple[torch.Tensor]) -> None:
    model = torch.nn.Linear(4, 4)
    program = to_edge(torch.export.export(model, inputs)).exported_program()
    inner = to_backend("_Traced", program, [])
    wrapped = to_edge(torch.export.export(torch.nn.Sequential(inner), inputs)).exported_program()
    outer = to_backend("_Traced", wrapped, [])
    (handles,) = outer.meta["debug_handle_map"].values()
    # The attribute that holds the delegate, its call, and what takes the result out of it.
    assert len(set(handles)) == 3


def test_what_backends_name_is_found_in_the_manager(exported: ExportedProgram) -> None:
    assert to_edge(exported)._named_data_store.get_named_data_store_output().buffers == []
