"""Lower parts of an ExportedProgram to compiler backends."""

from lowerdeck.lowered_module.backend import BackendDetails, PreprocessResult
from lowerdeck.lowered_module.compile_spec import CompileSpec
from lowerdeck.lowered_module.delegate_mapping import DelegateMappingBuilder
from lowerdeck.lowered_module.errors import (
    AmbiguousBackendError,
    BackendNotFoundError,
    DelegateMappingError,
    LoweringError,
    OwnershipError,
    PartitionError,
    PreprocessError,
    SignatureError,
    UnsupportedOperatorError,
)
from lowerdeck.lowered_module.partitioner import (
    DELEGATION_TAG,
    DelegationSpec,
    Partitioner,
    PartitionResult,
)

__all__ = [
    # What a backend author writes
    "BackendDetails",
    "CompileSpec",
    "DelegateMappingBuilder",
    "PreprocessResult",
    # What says which nodes go where
    "DELEGATION_TAG",
    "DelegationSpec",
    "PartitionResult",
    "Partitioner",
    # Errors
    "AmbiguousBackendError",
    "BackendNotFoundError",
    "DelegateMappingError",
    "LoweringError",
    "OwnershipError",
    "PartitionError",
    "PreprocessError",
    "SignatureError",
    "UnsupportedOperatorError",
]
