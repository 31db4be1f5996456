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

# Search order: the modules that reading needs come first.
_MODULES = (
    *("errors", "escaping", "flatbuffer.storage", "pte.enums", "pte.layout", "pte.schema"),
    *("pte.named_data", "pte.container", "pte.read", "flatbuffer.stream", "pte.write"),
    *("ptd.external_read", "ptd.external_write", "ptd.model_files", "bundle", "kernels.table"),
    *("pte.digest", "xnnpack.operators", "xnnpack.graph"),
    *("xnnpack.payload", "xnnpack.releases", "xnnpack.verify", "verify.hazards", "verify.verify"),
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
