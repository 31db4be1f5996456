"""Read, write and verify ExecuTorch's .pte, .ptd and .bpte files, without torch."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowerdeck.serializer.bundled import (
        BundledProgram,
        BundledTensor,
        BundledValue,
        MethodTestCase,
        MethodTestSuite,
        deserialize_bundle,
        is_bundle,
        serialize_bundle,
        write_bundle,
    )
    from lowerdeck.serializer.errors import (
        AlignmentError,
        ContentError,
        EnumError,
        FormatError,
        HeaderError,
        IndexRangeError,
        LimitError,
        MagicError,
        MissingFieldError,
        NamedDataConflictError,
        OffsetError,
        ProgramError,
        SegmentError,
        SerializerError,
        TableError,
        TableLimitWarning,
        TextError,
        TraceError,
        TruncatedError,
    )
    from lowerdeck.serializer.escaping import printable
    from lowerdeck.serializer.etdump import ProfileEvent, RunData, serialize_etdump, write_etdump
    from lowerdeck.serializer.flatbuffer.storage import (
        FileRange,
        byte_view,
        resident_view,
        storage_size,
    )
    from lowerdeck.serializer.flatbuffer.stream import write_pieces
    from lowerdeck.serializer.kernels.table import (
        RUNTIME_VERSION,
        RuntimeKernel,
        kernel_names,
        runtime_kernels,
    )
    from lowerdeck.serializer.ptd import (
        ExternalData,
        ExternalEntry,
        OpenModel,
        PtdFile,
        deserialize_ptd,
        external_data,
        open_model,
        open_ptd,
        serialize_ptd,
        write_model,
        write_ptd,
    )
    from lowerdeck.serializer.pte.digest import method_digest
    from lowerdeck.serializer.pte.enums import (
        DataLocation,
        DeviceType,
        ScalarType,
        TensorDataLocation,
        TensorShapeDynamism,
    )
    from lowerdeck.serializer.pte.header import ExtendedHeader
    from lowerdeck.serializer.pte.layout import FileLayout
    from lowerdeck.serializer.pte.named_data import (
        DataEntry,
        NamedDataStore,
        NamedDataStoreOutput,
        TensorLayout,
    )
    from lowerdeck.serializer.pte.read import DelegateEntry, PteFile, deserialize_pte, open_pte
    from lowerdeck.serializer.pte.schema import (
        AllocationDetails,
        BackendDelegate,
        BackendDelegateDataReference,
        BackendDelegateInlineData,
        Bool,
        BoolList,
        Buffer,
        Chain,
        CompileSpec,
        ContainerMetadata,
        DataSegment,
        DelegateCall,
        Double,
        DoubleList,
        EValue,
        ExecutionPlan,
        ExtraTensorInfo,
        Frame,
        FrameList,
        FreeCall,
        Instruction,
        InstructionArguments,
        Int,
        IntList,
        JumpFalseCall,
        KernelCall,
        KernelTypes,
        MoveCall,
        NamedData,
        NonConstBufferDevice,
        Null,
        Operator,
        OptionalTensorList,
        Program,
        Storage,
        String,
        SubsegmentOffsets,
        Tensor,
        TensorList,
    )
    from lowerdeck.serializer.pte.write import serialize_pte, write_pte
    from lowerdeck.serializer.verify import Hazard, verify_pte
    from lowerdeck.serializer.xnnpack.graph import (
        XnnConstant,
        XnnEncoding,
        XnnGraph,
        XnnNode,
        XnnValue,
    )
    from lowerdeck.serializer.xnnpack.operators import XnnDatatype, XnnOperator
    from lowerdeck.serializer.xnnpack.payload import decode_payload, encode_payload
    from lowerdeck.serializer.xnnpack.releases import needed_release
    from lowerdeck.serializer.xnnpack.verify import verify_payload

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
    "deserialize_bundle",
    "is_bundle",
    # What took how long
    "ProfileEvent",
    "RunData",
    "serialize_etdump",
    "write_etdump",
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
    "HeaderError",
    "OffsetError",
    "AlignmentError",
    "TableError",
    "MissingFieldError",
    "EnumError",
    "TextError",
    "LimitError",
    "SegmentError",
    "IndexRangeError",
    "ContentError",
    "TableLimitWarning",
]

# In the order in which they are searched: what reading needs comes first.
_MODULES = (
    *("errors", "escaping", "flatbuffer.storage", "pte.enums", "pte.layout", "pte.schema"),
    *("pte.named_data", "pte.header", "pte.read", "flatbuffer.stream", "pte.write", "ptd"),
    *("bundled", "kernels.table", "pte.digest", "etdump", "xnnpack.operators", "xnnpack.graph"),
    *("xnnpack.payload", "xnnpack.releases", "xnnpack.verify", "verify"),
)

if not TYPE_CHECKING:  # A type checker would take any name for one of ours.

    def __getattr__(name: str) -> Any:
        """Return a name whose module is imported at its first use."""
        for module in _MODULES if name in __all__ else ():
            found = importlib.import_module(f"{__name__}.{module}")
            if hasattr(found, name):
                globals()[name] = getattr(found, name)
                return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        """Return all names, those that are not imported yet too."""
        return sorted({*globals(), *__all__})
