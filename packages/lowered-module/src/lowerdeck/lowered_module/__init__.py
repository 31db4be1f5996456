"""Lower parts of an ExportedProgram to compiler backends."""

import importlib
from typing import TYPE_CHECKING, Any

from lowerdeck.graph_fuser import create_submodule_from_nodes
from lowerdeck.torch_base import arguments_of, executorch_call_delegate

if TYPE_CHECKING:
    from lowerdeck.lowered_module.authoring.backend import (
        BackendDetails,
        CompileSpec,
        PreprocessResult,
    )
    from lowerdeck.lowered_module.authoring.declarative import (
        DeclarativeBackend,
        DeclarativePartitioner,
        visits,
    )
    from lowerdeck.lowered_module.authoring.delegate_mapping import DelegateMappingBuilder
    from lowerdeck.lowered_module.authoring.module_partitioner import ModulePartitioner
    from lowerdeck.lowered_module.authoring.node_partitioner import NodePartitioner
    from lowerdeck.lowered_module.authoring.partition_view import PartitionView
    from lowerdeck.lowered_module.authoring.partitioner import (
        DelegationSpec,
        Partitioner,
        PartitionResult,
    )
    from lowerdeck.lowered_module.authoring.registry import (
        backend_names,
        find_backend,
        find_partitioner,
        register_backend,
        unregister_backend,
    )
    from lowerdeck.lowered_module.authoring.rejects import (
        WhyNoPartition,
        WhyNoPartitionReporter,
        operator_name,
    )
    from lowerdeck.lowered_module.choosing import Trial, lower_fastest
    from lowerdeck.lowered_module.delegate.module import LoweredBackendModule
    from lowerdeck.lowered_module.errors import (
        AliasingError,
        AmbiguousBackendError,
        BackendNotFoundError,
        CacheError,
        DelegateMappingError,
        LoweringError,
        OwnershipError,
        PartitionerError,
        PartitionError,
        PreprocessError,
        SignatureError,
        UnsupportedOperatorError,
    )
    from lowerdeck.lowered_module.inspect.float_weights import FloatWeight
    from lowerdeck.lowered_module.inspect.graph_page import graph_html
    from lowerdeck.lowered_module.inspect.inspection import (
        format_delegated_graph,
        get_delegates,
        get_lowered_backend_modules,
        get_lowered_submodules,
        get_non_lowered_nodes,
        print_delegated_graph,
    )
    from lowerdeck.lowered_module.inspect.summary import (
        DelegationSummary,
        Remark,
        RootCause,
        delegation_summary,
    )
    from lowerdeck.lowered_module.lowering import MethodProgramsPartitionerSpec, to_backend
    from lowerdeck.lowered_module.pipeline import LoweredProgram, decomposed_for, lower
    from lowerdeck.lowered_module.program.constants import (
        constant_names,
        constant_tensors,
        tag_constant_data,
        tag_mutated_buffer,
    )
    from lowerdeck.lowered_module.program.debug_handles import assign_debug_handles
    from lowerdeck.lowered_module.program.edge_form import (
        changed_as_in_exir,
        in_edge_operators,
        in_torch_operators,
    )
    from lowerdeck.lowered_module.program.foldable import (
        fold_node,
        foldable_nodes,
        mode_stretches,
        read_by_one,
    )
    from lowerdeck.lowered_module.program.tags import DECISION, DELEGATION_TAG
    from lowerdeck.lowered_module.progress import Progress
    from lowerdeck.lowered_module.quantization import Quantization, find_quantization

__all__ = [
    # Lowering
    "LoweredBackendModule",
    "LoweredProgram",
    "MethodProgramsPartitionerSpec",
    "executorch_call_delegate",
    "Progress",
    "decomposed_for",
    "lower",
    "lower_fastest",
    "to_backend",
    "Trial",
    # For authors of backends
    "BackendDetails",
    "CompileSpec",
    "DelegateMappingBuilder",
    "PreprocessResult",
    "fold_node",
    "constant_names",
    "constant_tensors",
    "foldable_nodes",
    "mode_stretches",
    "read_by_one",
    # Declarative backends
    "DeclarativeBackend",
    "DeclarativePartitioner",
    "PartitionView",
    "arguments_of",
    "operator_name",
    "visits",
    # Partitioners
    "DECISION",
    "DELEGATION_TAG",
    "DelegationSpec",
    "ModulePartitioner",
    "NodePartitioner",
    "PartitionResult",
    "Partitioner",
    "tag_constant_data",
    "tag_mutated_buffer",
    # Quantisation
    "Quantization",
    "find_quantization",
    # The registry of backends
    "backend_names",
    "find_backend",
    "find_partitioner",
    "register_backend",
    "unregister_backend",
    # Inspection
    "DelegationSummary",
    "RootCause",
    "FloatWeight",
    "Remark",
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
    # Graphs and signatures
    "assign_debug_handles",
    "changed_as_in_exir",
    "create_submodule_from_nodes",
    "in_edge_operators",
    "in_torch_operators",
    # Errors
    "AliasingError",
    "AmbiguousBackendError",
    "BackendNotFoundError",
    "CacheError",
    "DelegateMappingError",
    "LoweringError",
    "OwnershipError",
    "PartitionError",
    "PartitionerError",
    "PreprocessError",
    "SignatureError",
    "UnsupportedOperatorError",
]

# Search order: partitioners and backends need the first modules; the last two need the emitter.
_MODULES = (
    *("errors", "authoring.backend", "authoring.delegate_mapping", "authoring.partitioner"),
    *("program.tags", "program.constants", "program.foldable", "lowering"),
    *("authoring.registry", "authoring.rejects", "delegate.module", "progress"),
    *("program.debug_handles", "program.edge_form", "authoring.partition_view"),
    *("authoring.node_partitioner", "authoring.declarative", "authoring.module_partitioner"),
    *("inspect.inspection", "inspect.float_weights", "inspect.summary", "quantization"),
    *("inspect.graph_page", "pipeline", "choosing"),
)

if not TYPE_CHECKING:  # With ``__getattr__``, a type checker accepts any name.

    def __getattr__(name: str) -> Any:
        """Return a public name, importing its module on first use."""
        for module in _MODULES if name in __all__ else ():
            submodule = importlib.import_module(f"{__name__}.{module}")
            if hasattr(submodule, name):
                globals()[name] = getattr(submodule, name)
                return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        """Return all names, including those not imported yet."""
        return sorted({*globals(), *__all__})
