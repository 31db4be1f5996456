"""The parameters of ExecuTorch's backend API, under which ours are called by keyword too."""

from __future__ import annotations

import importlib
import inspect
from operator import attrgetter

import pytest
import torch

from lowerdeck import lowered_module, serializer

pytest.importorskip("executorch.exir.backend.backend_api")

THEIRS = {
    "executorch.exir.backend.backend_details": (
        "BackendDetails.preprocess",
        "BackendDetails.preprocess_multimethod",
        "PreprocessResult",
    ),
    "executorch.exir.backend.compile_spec_schema": ("CompileSpec",),
    "executorch.exir.backend.partitioner": (
        "DelegationSpec",
        "PartitionResult",
        "Partitioner",
        "Partitioner.ops_to_not_decompose",
        "Partitioner.partition",
    ),
    "executorch.exir.backend.backend_api": ("MethodProgramsPartitionerSpec",),
    "executorch.exir.backend.utils": (
        "DelegateMappingBuilder",
        "DelegateMappingBuilder.get_delegate_mapping",
        "DelegateMappingBuilder.insert_delegate_mapping_entry",
        "WhyNoPartition",
        "WhyNoPartitionReporter.get_table_report",
        "WhyNoPartitionReporter.report_reject",
        "format_delegated_graph",
        "get_delegates",
        "get_non_lowered_nodes",
        "print_delegated_graph",
        "tag_constant_data",
        "tag_mutated_buffer",
    ),
    "executorch.exir.lowered_backend_module": (
        "LoweredBackendModule",
        "LoweredBackendModule.buffer",
        "LoweredBackendModule.program",
        "create_submodule_from_nodes",
        "get_lowered_backend_modules",
        "get_lowered_submodules",
    ),
}
PAIRS = [(module, name) for module, names in THEIRS.items() for name in names]


@pytest.mark.parametrize(("module", "name"), PAIRS)
def test_ours_take_every_parameter_of_theirs_by_its_name(module: str, name: str) -> None:
    theirs = inspect.signature(attrgetter(name)(importlib.import_module(module))).parameters
    ours = inspect.signature(attrgetter(name)(lowered_module)).parameters
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    wanted = {one.name for one in theirs.values() if one.kind not in variable}
    assert wanted <= set(ours)
    required = {one.name for one in ours.values() if one.default is inspect.Parameter.empty}
    assert required <= set(theirs)


@pytest.mark.parametrize(
    "name", ["add_named_data", "get_named_data_store_output", "merge_named_data_store"]
)
def test_a_store_of_named_data_is_called_as_theirs(name: str) -> None:
    store = importlib.import_module("executorch.exir._serialize._named_data_store").NamedDataStore
    theirs = inspect.signature(getattr(store, name)).parameters
    assert list(inspect.signature(getattr(serializer.NamedDataStore, name)).parameters) == [
        *theirs
    ]


def test_executorch_lowers_with_a_backend_that_returns_our_result() -> None:
    details = importlib.import_module("executorch.exir.backend.backend_details").BackendDetails

    class ReturnsOurs(details):  # type: ignore[misc, valid-type]
        @staticmethod
        def preprocess(edge_program, compile_specs):  # type: ignore[no-untyped-def]
            del edge_program, compile_specs
            return lowered_module.PreprocessResult(b"blob", delegate_info_meta="told")

    to_backend = importlib.import_module("executorch.exir.backend.backend_api").to_backend
    program = torch.export.export(torch.nn.ReLU(), (torch.ones(2),))
    lowered = to_backend(ReturnsOurs.__name__, program, [])
    assert lowered.processed_bytes == b"blob"
    assert lowered.meta["_delegate_info_meta"] == "told"
