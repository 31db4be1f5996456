"""The tables of a `.pte` file as plain slotted dataclasses, named as the schema names them.

A :class:`Program` in memory is *logical*: it holds buffers directly, without segments.
:func:`lowerdeck.serializer.serialize_pte` creates segments and
:func:`lowerdeck.serializer.deserialize_pte` resolves them, so the three fields of the file that
only describe segments (``segments``, ``constant_segment``, ``mutable_data_segments``) are absent
here; :attr:`Program.mutable_data` has the data to which ``mutable_data_segments`` refers.

Most classes are not frozen, because a frozen dataclass takes longer to create.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, TypeAlias

from lowerdeck.serializer.flatbuffer.storage import FileRange, pickled
from lowerdeck.serializer.flatbuffer.wire import parse_schema
from lowerdeck.serializer.pte.enums import (
    DataLocation,
    DeviceType,
    ScalarType,
    TensorDataLocation,
    TensorShapeDynamism,
)
from lowerdeck.serializer.pte.layout import FileLayout

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

Storage: TypeAlias = "ReadableBuffer | FileRange"
"""Bytes of a program: an object with the buffer protocol, or a range of a file."""

_LOW_BITS = 0xFFFFFFFF


@dataclass(slots=True)
class Null:
    """The value None."""


@dataclass(slots=True)
class Int:
    """A 64-bit signed integer: also a dtype, a layout or a memory format."""

    int_val: int


@dataclass(slots=True)
class Bool:
    """A boolean."""

    bool_val: bool


@dataclass(slots=True)
class Double:
    """An IEEE double; infinities and NaN are allowed."""

    double_val: float


@dataclass(slots=True)
class String:
    """A string, stored as UTF-8."""

    string_val: str


@dataclass(slots=True)
class IntList:
    """A list of integers, each given as the *index* of an :class:`Int` value of the method."""

    items: list[int]


@dataclass(slots=True)
class DoubleList:
    """A list of literal doubles."""

    items: list[float]


@dataclass(slots=True)
class BoolList:
    """A list of literal booleans."""

    items: list[bool]


@dataclass(slots=True)
class TensorList:
    """A list of tensors, each given as a value index; the tensors must come before the list."""

    items: list[int]


@dataclass(slots=True)
class OptionalTensorList:
    """A list of tensors or None: value indices, with -1 for None."""

    items: list[int]


@dataclass(slots=True)
class AllocationDetails:
    """Location of a tensor in planned memory.

    Attributes:
        memory_id: Index into ``ExecutionPlan.non_const_buffer_sizes``; 0 is reserved.
        memory_offset_low: Lower 32 bits of the offset in bytes.
        memory_offset_high: Upper 32 bits of the offset.
    """

    memory_id: int
    memory_offset_low: int
    memory_offset_high: int = 0

    @classmethod
    def at(cls, memory_id: int, offset: int) -> AllocationDetails:
        """Return the details for ``offset`` bytes into the memory ``memory_id``.

        Args:
            memory_id: Index of the memory, from 1.
            offset: Offset in bytes, below 2**64.
        """
        return cls(memory_id, offset & _LOW_BITS, offset >> 32)

    @property
    def memory_offset(self) -> int:
        """Return the whole 64-bit offset in bytes."""
        return self.memory_offset_high << 32 | self.memory_offset_low


@dataclass(slots=True)
class ExtraTensorInfo:
    """Optional name, data location and device of a tensor.

    Attributes:
        mutable_data_segments_idx: Index of the mutable data segment; the runtime always uses 0.
        fully_qualified_name: Name of a parameter or buffer, the key of external data.
        location: Storage location of the bytes.
        device_type: The device that holds the tensor.
        device_index: Index of the device within its type.
    """

    mutable_data_segments_idx: int = 0
    fully_qualified_name: str | None = None
    location: TensorDataLocation = TensorDataLocation.SEGMENT
    device_type: DeviceType = DeviceType.CPU
    device_index: int = 0


@dataclass(slots=True)
class Tensor:
    """A tensor: its type, its shape and the location of its bytes.

    ``data_buffer_idx`` above 0 is an index. Without ``allocation_info`` it refers to a constant in
    :attr:`Program.constant_buffer`, with it to the initial value of a mutable tensor in
    :attr:`Program.mutable_data`.

    Attributes:
        storage_offset: Always 0; the runtime rejects other values.
        sizes: Shape, or its upper bound if dynamic. At most 16 dimensions.
        dim_order: Dimensions from the outermost in memory to the innermost.
        requires_grad: Kept for tools; the runtime ignores it.
        data_buffer_idx: Index of the bytes, 0 for none.
        allocation_info: Location in planned memory, None for a constant or memory of the caller.
        layout: Number of torch's ``Layout``; 0 is strided.
        shape_dynamism: Whether the shape may change.
        extra_tensor_info: Optional name, data location and device.
    """

    scalar_type: ScalarType
    storage_offset: int = 0
    sizes: list[int] = field(default_factory=list)
    dim_order: list[int] = field(default_factory=list)
    requires_grad: bool = False
    data_buffer_idx: int = 0
    allocation_info: AllocationDetails | None = None
    layout: int = 0
    shape_dynamism: TensorShapeDynamism = TensorShapeDynamism.STATIC
    extra_tensor_info: ExtraTensorInfo | None = None

    @property
    def nbytes(self) -> int:
        """Return the size in bytes (the upper bound if the shape is dynamic)."""
        return prod(self.sizes) * self.scalar_type.itemsize


KernelTypes: TypeAlias = (
    Null
    | Int
    | Bool
    | Double
    | Tensor
    | String
    | IntList
    | DoubleList
    | BoolList
    | TensorList
    | OptionalTensorList
)
"""The union that an :class:`EValue` holds."""


@dataclass(slots=True)
class EValue:
    """One value of a method: an argument, an intermediate result, a constant or an output."""

    val: KernelTypes


@dataclass(slots=True)
class KernelCall:
    """A call of an operator.

    Attributes:
        op_index: Index into ``ExecutionPlan.operators``.
        args: Value indices, one for each schema argument in order, and one for the return value.
    """

    op_index: int
    args: list[int]


@dataclass(slots=True)
class DelegateCall:
    """A call of a delegate.

    Attributes:
        delegate_index: Index into ``ExecutionPlan.delegates``.
        args: Value indices of the inputs, then of the outputs.
    """

    delegate_index: int
    args: list[int]


@dataclass(slots=True)
class MoveCall:
    """Copies the handle of a value (for a tensor its pointer, not its bytes).

    Attributes:
        move_from: Index of the value that is read.
        move_to: Index of the value that is overwritten.
    """

    move_from: int
    move_to: int


@dataclass(slots=True)
class JumpFalseCall:
    """Jumps within the chain if a condition is false.

    Attributes:
        cond_value_index: Index of a Bool, or of a bool tensor (true when all elements are).
        destination_instruction: Index of the next instruction in this chain; the instruction count
            ends the chain.
    """

    cond_value_index: int
    destination_instruction: int


@dataclass(slots=True)
class FreeCall:
    """Drops the memory of a tensor value."""

    value_index: int


InstructionArguments: TypeAlias = KernelCall | DelegateCall | MoveCall | JumpFalseCall | FreeCall
"""The union that an :class:`Instruction` holds."""


@dataclass(slots=True)
class Instruction:
    """One step of a chain."""

    instr_args: InstructionArguments


@dataclass(frozen=True, slots=True)
class Frame:
    """One stack frame of an instruction; frozen, because thousands of instructions share it."""

    filename: str
    lineno: int
    name: str
    context: str


@dataclass(slots=True)
class FrameList:
    """The stack trace of one instruction."""

    items: list[Frame]


@dataclass(slots=True)
class Chain:
    """A list of instructions that run in order.

    Attributes:
        inputs: Unused by the runtime.
        outputs: Unused by the runtime.
        stacktrace: One entry for each instruction, or None.
    """

    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    stacktrace: list[FrameList] | None = None


@dataclass(slots=True)
class Operator:
    """A kernel by name, such as ``Operator("aten::add", "out")``; overload "" is the default."""

    name: str
    overload: str = ""

    @property
    def full_name(self) -> str:
        """Return ``name.overload``, or ``name`` alone when the overload is empty."""
        return f"{self.name}.{self.overload}" if self.overload else self.name


@dataclass(slots=True)
class CompileSpec:
    """One setting of a backend, passed at lowering and again at load."""

    key: str
    value: Storage


@dataclass(slots=True)
class BackendDelegateDataReference:
    """Location of a delegate's bytes.

    In a logical program the location is ``INLINE`` and the index points into
    :attr:`Program.backend_delegate_data`.
    """

    location: DataLocation
    index: int


@dataclass(slots=True)
class BackendDelegate:
    """A compiled subgraph.

    Attributes:
        id: Name under which the backend is registered in the runtime.
        processed: Location of its bytes.
        compile_specs: Settings for the backend.
    """

    id: str
    processed: BackendDelegateDataReference
    compile_specs: list[CompileSpec] = field(default_factory=list)


@dataclass(slots=True)
class ContainerMetadata:
    """Pytree specs of the inputs and outputs, as JSON text; the runtime ignores them."""

    encoded_inp_str: str
    encoded_out_str: str


@dataclass(slots=True)
class NonConstBufferDevice:
    """Device of one planned memory.

    Attributes:
        buffer_idx: Index into ``ExecutionPlan.non_const_buffer_sizes``.
    """

    buffer_idx: int
    device_type: DeviceType = DeviceType.CPU
    device_index: int = 0


@dataclass(slots=True)
class ExecutionPlan:
    """One method.

    Attributes:
        name: Name of the method, such as ``"forward"``.
        container_meta_type: Pytree specs, or None.
        values: Every value of the method, in one flat table.
        inputs: Value indices of the inputs.
        outputs: Value indices of the outputs.
        chains: The code; at least one chain.
        operators: The kernels that the code calls.
        delegates: The delegates that the code calls.
        non_const_buffer_sizes: Size in bytes of each planned memory; entry 0 is reserved.
        non_const_buffer_device: Devices of planned memories, or None for the CPU.
    """

    name: str
    container_meta_type: ContainerMetadata | None = None
    values: list[EValue] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    chains: list[Chain] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)
    delegates: list[BackendDelegate] = field(default_factory=list)
    non_const_buffer_sizes: list[int] = field(default_factory=lambda: [0])
    non_const_buffer_device: list[NonConstBufferDevice] | None = None


@dataclass(slots=True)
class Buffer:
    """The bytes of one constant, or of the initial value of one mutable buffer."""

    storage: Storage

    def __reduce__(self) -> tuple[type[Buffer], tuple[Storage]]:
        """Pickle the bytes themselves."""
        return Buffer, (pickled(self.storage),)


@dataclass(slots=True)
class BackendDelegateInlineData:
    """The bytes of one delegate."""

    data: Storage

    def __reduce__(self) -> tuple[type[BackendDelegateInlineData], tuple[Storage]]:
        """Pickle the bytes themselves."""
        return BackendDelegateInlineData, (pickled(self.data),)


@dataclass(slots=True)
class DataSegment:
    """A range of the file after the FlatBuffer.

    Attributes:
        offset: First byte, counted from the segment base.
    """

    offset: int
    size: int


@dataclass(slots=True)
class SubsegmentOffsets:
    """Offsets of the items of one segment.

    Attributes:
        segment_index: Index into the segments of the file.
        offsets: Offset of each item from the start of the segment; item 0 is reserved.
    """

    segment_index: int
    offsets: list[int]


@dataclass(slots=True)
class NamedData:
    """A blob that delegates look up by its key.

    Attributes:
        key: The key, unique in the program.
        data: The bytes; in the file they are a segment, which several keys may share.
        alignment: Alignment of the blob relative to the start of the file.
    """

    key: str
    data: Storage
    alignment: int = 1


def _placeholder() -> list[Buffer]:
    return [Buffer(b"")]


@dataclass(slots=True)
class Program:
    """A whole program: its methods and all their data.

    Attributes:
        version: Version of the schema; 0.
        constant_buffer: Constants, shared by all methods; entry 0 is reserved and empty.
        mutable_data: Initial values of mutable buffers; entry 0 is reserved and empty.
        backend_delegate_data: The bytes of the delegates.
        named_data: Blobs that delegates look up by key.
        layout: Layout of the source file, so that a rewrite gives the same bytes; None for a
            program created in memory.
    """

    version: int = 0
    execution_plan: list[ExecutionPlan] = field(default_factory=list)
    constant_buffer: list[Buffer] = field(default_factory=_placeholder)
    mutable_data: list[Buffer] = field(default_factory=_placeholder)
    backend_delegate_data: list[BackendDelegateInlineData] = field(default_factory=list)
    named_data: list[NamedData] = field(default_factory=list)
    layout: FileLayout | None = field(default=None, compare=False)


_LOGICAL = ("Program", "NamedData")
PROGRAM_FORMAT = parse_schema(
    "program.fbs", {name: kind for name, kind in globals().items() if name not in _LOGICAL}
)
"""The tables of a `.pte` file; the root ``Program`` has segments, unlike :class:`Program`."""
