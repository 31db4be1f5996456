"""Whoever calls ExecuTorch's backend API by keyword calls ours with the same words."""

from __future__ import annotations

import inspect
from operator import attrgetter

import pytest
import torch
from torch.export import export

from lowerdeck import lowered_module
from lowerdeck.emitter import EmitConfig
from lowerdeck.lowered_module import (
    BackendDetails,
    LoweredBackendModule,
    PreprocessResult,
    to_backend,
    unregister_backend,
)

# As executorch 1.4.1 declares them (exir/backend/*.py, exir/lowered_backend_module.py), in its
# order; tests/peers compares with the installed one.
EXIR = {
    "BackendDetails.preprocess": "edge_program compile_specs",
    "BackendDetails.preprocess_multimethod": "edge_programs compile_specs",
    "CompileSpec": "key value",
    "DelegateMappingBuilder": "generated_identifiers",
    "DelegateMappingBuilder.get_delegate_mapping": "self",
    "DelegateMappingBuilder.insert_delegate_mapping_entry": "self nodes handles identifier",
    "DelegationSpec": "backend_id compile_specs",
    "LoweredBackendModule": (
        "edge_program backend_id processed_bytes compile_specs named_data_store_output"
    ),
    "LoweredBackendModule.buffer": (
        "self extract_delegate_segments segment_alignment constant_tensor_alignment "
        "delegate_alignment memory_planning"
    ),
    "LoweredBackendModule.program": "self emit_stacktrace memory_planning",
    "MethodProgramsPartitionerSpec": "method_to_edge_program method_to_partitioner",
    "PartitionResult": "tagged_exported_program partition_tags",
    "Partitioner": "spec",
    "Partitioner.ops_to_not_decompose": "self ep",
    "Partitioner.partition": "self exported_program",
    "WhyNoPartition": "logger",
    "WhyNoPartitionReporter.get_table_report": "self",
    "WhyNoPartitionReporter.report_reject": "self node reason",
    "arrange_graph_outputs": "gm output_specs call_module_node",
    "arrange_graph_placeholders": "gm owning_program tag",
    "create_exported_program_from_submodule": (
        "submodule owning_program tag call_module_node is_submodule"
    ),
    "create_submodule_from_nodes": "gm node_list tag skip_legalize_graph",
    "format_delegated_graph": "graph_module",
    "get_delegates": "graph",
    "get_lowered_backend_modules": "graph_module",
    "get_lowered_submodules": "graph_module",
    "get_non_lowered_nodes": "graph",
    "print_delegated_graph": "graph_module",
    "tag_constant_data": "edge_program",
    "tag_mutated_buffer": "edge_program",
}


@pytest.mark.parametrize("name", EXIR)
def test_parameters_are_called_as_exirs(name: str) -> None:
    found = inspect.signature(attrgetter(name)(lowered_module)).parameters
    wanted = EXIR[name].split()
    assert list(found)[: len(wanted)] == wanted
    for parameter in list(found.values())[len(wanted) :]:
        assert parameter.default is not inspect.Parameter.empty, parameter


def test_a_result_is_made_and_read_by_exirs_name_for_what_tools_want() -> None:
    exir = ("processed_bytes", "debug_handle_map", "data_store_output", "_delegate_info_meta")
    made = PreprocessResult(**dict(zip(exir, (b"x", {1: (2,)}, None, "told"), strict=True)))  # type: ignore[arg-type]
    assert [getattr(made, name) for name in exir] == [b"x", {1: (2,)}, None, "told"]
    assert made == PreprocessResult(b"x", {1: (2,)}, None, "told")
    assert made.delegate_info_meta == "told"


class Keywords(BackendDetails):
    """Compiles nothing."""

    @staticmethod
    def preprocess(edge_program, compile_specs):  # type: ignore[no-untyped-def]
        del edge_program, compile_specs
        return PreprocessResult(b"blob")


def test_a_program_is_emitted_with_exirs_words() -> None:
    program = export(torch.nn.ReLU(), (torch.ones(2),))
    try:
        lowered = to_backend(backend_id="Keywords", edge_program=program, compile_specs=[])
    finally:
        unregister_backend("Keywords")
    assert isinstance(lowered, LoweredBackendModule)
    (plan,) = lowered.program(emit_stacktrace=True).execution_plan
    assert plan.chains[0].stacktrace
    (plan,) = lowered.program().execution_plan
    assert not plan.chains[0].stacktrace
    with pytest.raises(TypeError, match="give one"):
        lowered.program(memory_planning=EmitConfig(), config=EmitConfig())
