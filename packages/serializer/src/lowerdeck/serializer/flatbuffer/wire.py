"""The tables as they are in the file: for each its fields in id order, and their kinds.

A kind is a scalar (``i32``), ``str``, ``bytes`` (a vector of bytes that is not copied), a vector
(``[i32]``, ``[Tensor]``), a table (``Tensor``) or a union (``union``, whose type is the field
before it).
"""

from __future__ import annotations

from struct import calcsize
from typing import NamedTuple

FILE_IDENTIFIER = b"ET12"
EXTERNAL_IDENTIFIER = b"FT01"
BUNDLE_IDENTIFIER = b"BP08"
ETDUMP_IDENTIFIER = b"ED00"

SCALAR_CODES = {
    "u8": "B",
    "i8": "b",
    "bool": "?",
    "i16": "h",
    "i32": "i",
    "u32": "I",
    "i64": "q",
    "u64": "Q",
    "f32": "f",
    "f64": "d",
}
SCALAR_SIZES = {kind: calcsize(f"<{code}") for kind, code in SCALAR_CODES.items()}

# Members of the unions, in the order of their numbers (0 is NONE).
KERNEL_TYPES = (
    "NONE",
    "Null",
    "Int",
    "Bool",
    "Double",
    "Tensor",
    "String",
    "IntList",
    "DoubleList",
    "BoolList",
    "TensorList",
    "OptionalTensorList",
)
BUNDLED_VALUES = ("NONE", "Tensor", "Int", "Bool", "Double")
INSTRUCTION_ARGUMENTS = (
    "NONE",
    "KernelCall",
    "DelegateCall",
    "MoveCall",
    "JumpFalseCall",
    "FreeCall",
)


class Field(NamedTuple):
    """One field of a table: its name and its kind."""

    name: str
    kind: str

    @property
    def is_offset(self) -> bool:
        """Return whether the field holds an offset to something else."""
        return self.kind not in SCALAR_CODES

    @property
    def code(self) -> str:
        """Return the struct code of what the table itself holds."""
        return SCALAR_CODES.get(self.kind, "I")

    @property
    def size(self) -> int:
        """Return the number of bytes in the table itself."""
        return SCALAR_SIZES.get(self.kind, 4)


def parse_fields(text: str) -> tuple[Field, ...]:
    """Return the fields of a table, written ``name:kind`` and in the order of their ids."""
    return tuple(Field(*part.split(":")) for part in text.split())


PROGRAM_TABLES: dict[str, tuple[Field, ...]] = {
    "Program": parse_fields(
        "version:u32 execution_plan:[ExecutionPlan] constant_buffer:[Buffer]"
        " backend_delegate_data:[BackendDelegateInlineData] segments:[DataSegment]"
        " constant_segment:SubsegmentOffsets mutable_data_segments:[SubsegmentOffsets]"
        " named_data:[NamedData]"
    ),
    "ExecutionPlan": parse_fields(
        "name:str container_meta_type:ContainerMetadata values:[EValue] inputs:[i32]"
        " outputs:[i32] chains:[Chain] operators:[Operator] delegates:[BackendDelegate]"
        " non_const_buffer_sizes:[i64] non_const_buffer_device:[NonConstBufferDevice]"
    ),
    "ContainerMetadata": parse_fields("encoded_inp_str:str encoded_out_str:str"),
    "EValue": parse_fields("val_type:u8 val:union"),
    "Null": (),
    "Int": parse_fields("int_val:i64"),
    "Bool": parse_fields("bool_val:bool"),
    "Double": parse_fields("double_val:f64"),
    "String": parse_fields("string_val:str"),
    "IntList": parse_fields("items:[i64]"),
    "DoubleList": parse_fields("items:[f64]"),
    "BoolList": parse_fields("items:[bool]"),
    "TensorList": parse_fields("items:[i32]"),
    "OptionalTensorList": parse_fields("items:[i32]"),
    "Tensor": parse_fields(
        "scalar_type:i8 storage_offset:i32 sizes:[i32] dim_order:[u8] requires_grad:bool"
        " data_buffer_idx:u32 allocation_info:AllocationDetails layout:i8 shape_dynamism:i8"
        " extra_tensor_info:ExtraTensorInfo"
    ),
    "AllocationDetails": parse_fields(
        "memory_id:u32 memory_offset_low:u32 memory_offset_high:u32"
    ),
    "ExtraTensorInfo": parse_fields(
        "mutable_data_segments_idx:u64 fully_qualified_name:str location:i8 device_type:i8"
        " device_index:i8"
    ),
    "Operator": parse_fields("name:str overload:str"),
    "Chain": parse_fields(
        "inputs:[i32] outputs:[i32] instructions:[Instruction] stacktrace:[FrameList]"
    ),
    "Instruction": parse_fields("instr_args_type:u8 instr_args:union"),
    "KernelCall": parse_fields("op_index:i32 args:[i32]"),
    "DelegateCall": parse_fields("delegate_index:i32 args:[i32]"),
    "MoveCall": parse_fields("move_from:i32 move_to:i32"),
    "JumpFalseCall": parse_fields("cond_value_index:i32 destination_instruction:i32"),
    "FreeCall": parse_fields("value_index:i32"),
    "FrameList": parse_fields("items:[Frame]"),
    "Frame": parse_fields("filename:str lineno:i32 name:str context:str"),
    "BackendDelegate": parse_fields(
        "id:str processed:BackendDelegateDataReference compile_specs:[CompileSpec]"
    ),
    "BackendDelegateDataReference": parse_fields("location:i8 index:u32"),
    "CompileSpec": parse_fields("key:str value:bytes"),
    "Buffer": parse_fields("storage:bytes"),
    "BackendDelegateInlineData": parse_fields("data:bytes"),
    "DataSegment": parse_fields("offset:u64 size:u64"),
    "SubsegmentOffsets": parse_fields("segment_index:u32 offsets:[u64]"),
    "NamedData": parse_fields("key:str segment_index:u32"),
    "NonConstBufferDevice": parse_fields("buffer_idx:i32 device_type:i8 device_index:i8"),
}
"""The tables of a `.pte` file; the root is ``Program``."""

EXTERNAL_TABLES: dict[str, tuple[Field, ...]] = {
    "FlatTensor": parse_fields("version:u32 segments:[DataSegment] named_data:[NamedData]"),
    "DataSegment": parse_fields("offset:u64 size:u64"),
    "NamedData": parse_fields("key:str segment_index:u32 tensor_layout:TensorLayout"),
    "TensorLayout": parse_fields("scalar_type:i8 sizes:[i32] dim_order:[u8]"),
}
"""The tables of a `.ptd` file; the root is ``FlatTensor``."""

BUNDLE_TABLES: dict[str, tuple[Field, ...]] = {
    "BundledProgram": parse_fields(
        "version:u32 method_test_suites:[BundledMethodTestSuite] program:bytes"
    ),
    "BundledMethodTestSuite": parse_fields("method_name:str test_cases:[BundledMethodTestCase]"),
    "BundledMethodTestCase": parse_fields("inputs:[Value] expected_outputs:[Value]"),
    "Value": parse_fields("val_type:u8 val:union"),
    "Tensor": parse_fields("scalar_type:i8 sizes:[i32] data:bytes dim_order:[u8]"),
    "Int": parse_fields("int_val:i64"),
    "Bool": parse_fields("bool_val:bool"),
    "Double": parse_fields("double_val:f64"),
}
"""The tables of a `.bpte` file; the root is ``BundledProgram``."""

ETDUMP_TABLES: dict[str, tuple[Field, ...]] = {
    "ETDump": parse_fields("version:u32 run_data:[RunData]"),
    "RunData": parse_fields(
        "name:str bundled_input_index:i32 allocators:[Allocator] events:[Event]"
    ),
    "Event": parse_fields(
        "profile_event:ProfileEvent allocation_event:AllocationEvent debug_event:DebugEvent"
    ),
    "ProfileEvent": parse_fields(
        "name:str chain_index:i32 instruction_id:i32 delegate_debug_id_int:i32"
        " delegate_debug_id_str:str delegate_debug_metadata:bytes start_time:u64 end_time:u64"
    ),
}
"""What we write of an ETDump file; the root is ``ETDump``. An index that is not there is -1."""
