"""Lower parts of an ExportedProgram to compiler backends."""

from lowerdeck.graph_fuser import create_submodule_from_nodes
from lowerdeck.lowered_module._torch_private import executorch_call_delegate
from lowerdeck.lowered_module.backend import BackendDetails, PreprocessResult
from lowerdeck.lowered_module.compile_spec import CompileSpec
from lowerdeck.lowered_module.constants import constant_names, constant_tensors
from lowerdeck.lowered_module.declarative import DeclarativeBackend, visits
from lowerdeck.lowered_module.delegate_mapping import DelegateMappingBuilder
from lowerdeck.lowered_module.errors import (
    AliasingError,
    AmbiguousBackendError,
    BackendNotFoundError,
    CacheError,
    DelegateMappingError,
    LoweringError,
    OwnershipError,
    PartitionError,
    PreprocessError,
    SignatureError,
    UnsupportedOperatorError,
)
from lowerdeck.lowered_module.graph_page import graph_html
from lowerdeck.lowered_module.inspection import (
    format_delegated_graph,
    get_delegates,
    get_lowered_backend_modules,
    get_lowered_submodules,
    get_non_lowered_nodes,
    print_delegated_graph,
)
from lowerdeck.lowered_module.lowering import MethodProgramsPartitionerSpec, to_backend
from lowerdeck.lowered_module.module import LoweredBackendModule
from lowerdeck.lowered_module.partition_view import PartitionView
from lowerdeck.lowered_module.partitioner import (
    DelegationSpec,
    Partitioner,
    PartitionResult,
)
from lowerdeck.lowered_module.progress import Progress
from lowerdeck.lowered_module.registry import (
    backend_names,
    find_backend,
    find_partitioner,
    register_backend,
    unregister_backend,
)
from lowerdeck.lowered_module.rejects import WhyNoPartition, WhyNoPartitionReporter
from lowerdeck.lowered_module.signature import (
    arrange_graph_outputs,
    arrange_graph_placeholders,
    create_exported_program_from_submodule,
)
from lowerdeck.lowered_module.summary import DelegationSummary, delegation_summary
from lowerdeck.lowered_module.supported import SupportedOp
from lowerdeck.lowered_module.table_partitioner import TablePartitioner
from lowerdeck.lowered_module.tagging import tag_constant_data, tag_mutated_buffer
from lowerdeck.lowered_module.tags import DELEGATION_TAG

__all__ = [
    # Lowering
    "LoweredBackendModule",
    "MethodProgramsPartitionerSpec",
    "executorch_call_delegate",
    "Progress",
    "to_backend",
    # What a backend author writes
    "BackendDetails",
    "CompileSpec",
    "DelegateMappingBuilder",
    "PreprocessResult",
    "constant_names",
    "constant_tensors",
    # The short way for a backend author
    "DeclarativeBackend",
    "PartitionView",
    "SupportedOp",
    "TablePartitioner",
    "visits",
    # What says which nodes go where
    "DELEGATION_TAG",
    "DelegationSpec",
    "PartitionResult",
    "Partitioner",
    "tag_constant_data",
    "tag_mutated_buffer",
    # Where backends are found
    "backend_names",
    "find_backend",
    "find_partitioner",
    "register_backend",
    "unregister_backend",
    # Looking at what was lowered
    "DelegationSummary",
    "WhyNoPartition",
    "WhyNoPartitionReporter",
    "delegation_summary",
    "format_delegated_graph",
    "get_delegates",
    "get_lowered_backend_modules",
    "get_lowered_submodules",
    "get_non_lowered_nodes",
    "graph_html",
    "print_delegated_graph",
    # Surgery on graphs and signatures
    "arrange_graph_outputs",
    "arrange_graph_placeholders",
    "create_exported_program_from_submodule",
    "create_submodule_from_nodes",
    # Errors
    "AliasingError",
    "AmbiguousBackendError",
    "BackendNotFoundError",
    "CacheError",
    "DelegateMappingError",
    "LoweringError",
    "OwnershipError",
    "PartitionError",
    "PreprocessError",
    "SignatureError",
    "UnsupportedOperatorError",
]
