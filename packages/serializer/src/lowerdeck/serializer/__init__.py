"""Read, write and verify ExecuTorch's .pte and .ptd files, without torch; write .bpte files."""

# ruff: noqa: F403, F405 (`__all__` lists the names once; type checkers resolve them through the
# star imports)

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # ``__all__`` selects their public names
    from lowerdeck.serializer.bundle import *
    from lowerdeck.serializer.errors import *
    from lowerdeck.serializer.escaping import *
    from lowerdeck.serializer.flatbuffer.storage import *
    from lowerdeck.serializer.flatbuffer.stream import *
    from lowerdeck.serializer.kernels.table import *
    from lowerdeck.serializer.ptd.external_read import *
    from lowerdeck.serializer.ptd.external_write import *
    from lowerdeck.serializer.ptd.model_files import *
    from lowerdeck.serializer.pte.container import *
    from lowerdeck.serializer.pte.digest import *
    from lowerdeck.serializer.pte.enums import *
    from lowerdeck.serializer.pte.layout import *
    from lowerdeck.serializer.pte.named_data import *
    from lowerdeck.serializer.pte.read import *
    from lowerdeck.serializer.pte.schema import *
    from lowerdeck.serializer.pte.write import *
    from lowerdeck.serializer.verify.hazards import *
    from lowerdeck.serializer.verify.verify import *
    from lowerdeck.serializer.xnnpack.graph import *
    from lowerdeck.serializer.xnnpack.operators import *
    from lowerdeck.serializer.xnnpack.payload import *
    from lowerdeck.serializer.xnnpack.releases import *
    from lowerdeck.serializer.xnnpack.verify import *

__all__ = [
    # Writing and reading
    "serialize_pte",
    "write_pte",
    "deserialize_pte",
    "open_pte",
    "verify_pte",
    "Hazard",
    "PteFile",
    "DelegateEntry",
    "ExtendedHeader",
    # External data
    "ExternalData",
    "ExternalEntry",
    "external_data",
    "serialize_ptd",
    "write_ptd",
    "deserialize_ptd",
    "open_ptd",
    "PtdFile",
    "write_model",
    "open_model",
    "OpenModel",
    # Programs with test cases
    "BundledProgram",
    "MethodTestSuite",
    "MethodTestCase",
    "BundledTensor",
    "BundledValue",
    "serialize_bundle",
    "write_bundle",
    "method_digest",
    # Text from files
    "printable",
    # Kernels
    "runtime_kernels",
    "RuntimeKernel",
    "RUNTIME_VERSION",
    "kernel_names",
    # XNNPACK's payloads
    "decode_payload",
    "encode_payload",
    "verify_payload",
    "needed_release",
    "XnnGraph",
    "XnnValue",
    "XnnEncoding",
    "XnnConstant",
    "XnnNode",
    "XnnOperator",
    "XnnDatatype",
    # Named data
    "NamedDataStore",
    "NamedDataStoreOutput",
    "DataEntry",
    "TensorLayout",
    # The program and its methods
    "Program",
    "ExecutionPlan",
    "ContainerMetadata",
    "Chain",
    "Operator",
    "Frame",
    "FrameList",
    "NonConstBufferDevice",
    # Values
    "EValue",
    "KernelTypes",
    "Null",
    "Int",
    "Bool",
    "Double",
    "Tensor",
    "AllocationDetails",
    "ExtraTensorInfo",
    "String",
    "IntList",
    "DoubleList",
    "BoolList",
    "TensorList",
    "OptionalTensorList",
    # Instructions
    "Instruction",
    "InstructionArguments",
    "KernelCall",
    "DelegateCall",
    "MoveCall",
    "JumpFalseCall",
    "FreeCall",
    # Delegates
    "BackendDelegate",
    "BackendDelegateDataReference",
    "BackendDelegateInlineData",
    "CompileSpec",
    # Bytes
    "Buffer",
    "NamedData",
    "DataSegment",
    "SubsegmentOffsets",
    "Storage",
    "FileRange",
    "byte_view",
    "resident_view",
    "storage_size",
    "write_pieces",
    "FileLayout",
    # Enumerations
    "ScalarType",
    "TensorShapeDynamism",
    "TensorDataLocation",
    "DataLocation",
    "DeviceType",
    # Errors
    "SerializerError",
    "ProgramError",
    "TraceError",
    "NamedDataConflictError",
    "FormatError",
    "TruncatedError",
    "MagicError",
    "OffsetError",
    "MissingFieldError",
    "ContentError",
    "LimitError",
    "SegmentError",
    "IndexRangeError",
]

# Writing a program needs few modules; the names that are not listed are those of its values.
_NAMES = {
    "escaping": "printable",
    "flatbuffer.storage": "FileRange byte_view resident_view storage_size",
    "flatbuffer.stream": "write_pieces",
    "pte.enums": "ScalarType TensorShapeDynamism TensorDataLocation DataLocation DeviceType",
    "pte.layout": "FileLayout",
    "pte.named_data": "NamedDataStore NamedDataStoreOutput DataEntry TensorLayout",
    "pte.container": "ExtendedHeader",
    "pte.read": "deserialize_pte open_pte PteFile DelegateEntry",
    "pte.write": "serialize_pte write_pte",
    "pte.digest": "method_digest",
    "ptd.external_read": "deserialize_ptd open_ptd PtdFile",
    "ptd.external_write": "ExternalData ExternalEntry external_data serialize_ptd write_ptd",
    "ptd.model_files": "write_model open_model OpenModel",
    "bundle": "BundledProgram MethodTestSuite MethodTestCase BundledTensor BundledValue "
    "serialize_bundle write_bundle",
    "kernels.table": "runtime_kernels RuntimeKernel RUNTIME_VERSION kernel_names",
    "xnnpack.operators": "XnnOperator XnnDatatype",
    "xnnpack.graph": "XnnGraph XnnValue XnnEncoding XnnConstant XnnNode",
    "xnnpack.payload": "decode_payload encode_payload",
    "xnnpack.releases": "needed_release",
    "xnnpack.verify": "verify_payload",
    "verify.hazards": "Hazard",
    "verify.verify": "verify_pte",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

if not TYPE_CHECKING:  # With ``__getattr__``, a type checker accepts any name.

    def __getattr__(name: str) -> Any:
        """Return a public name, importing its module on first use."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = _MODULE_OF.get(name) or ("errors" if name.endswith("Error") else "pte.schema")
        globals()[name] = getattr(importlib.import_module(f"{__name__}.{module}"), name)
        return globals()[name]

    def __dir__() -> list[str]:
        """Return all names, including those not imported yet."""
        return sorted({*globals(), *__all__})
