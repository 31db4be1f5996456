"""Programs for the tests: one small by hand, and any that hypothesis can think of."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from lowerdeck.serializer import (
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
    DataLocation,
    DelegateCall,
    DeviceType,
    Double,
    DoubleList,
    EValue,
    ExecutionPlan,
    ExtraTensorInfo,
    Frame,
    FrameList,
    FreeCall,
    Instruction,
    Int,
    IntList,
    JumpFalseCall,
    KernelCall,
    MoveCall,
    NamedData,
    NonConstBufferDevice,
    Null,
    Operator,
    OptionalTensorList,
    Program,
    ScalarType,
    String,
    Tensor,
    TensorDataLocation,
    TensorList,
    TensorShapeDynamism,
)


def add_program() -> Program:
    """Return ``forward(x) = x + weight``, with every field in order."""
    values = [
        EValue(_float_2x3(allocation=AllocationDetails.at(1, 0))),
        EValue(_float_2x3(index=1)),
        EValue(Int(1)),
        EValue(_float_2x3(allocation=AllocationDetails.at(1, 32))),
    ]
    plan = ExecutionPlan(
        "forward",
        ContainerMetadata("[1]", "[2]"),
        values,
        inputs=[0],
        outputs=[3],
        chains=[Chain(instructions=[Instruction(KernelCall(0, [0, 1, 2, 3, 3]))])],
        operators=[Operator("aten::add", "out")],
        non_const_buffer_sizes=[0, 64],
    )
    weight = Buffer(bytes(range(24)))
    return Program(execution_plan=[plan], constant_buffer=[Buffer(b""), weight])


def _float_2x3(index: int = 0, allocation: AllocationDetails | None = None) -> Tensor:
    return Tensor(
        ScalarType.FLOAT,
        sizes=[2, 3],
        dim_order=[0, 1],
        data_buffer_idx=index,
        allocation_info=allocation,
    )


_i32 = st.integers(-(2**31), 2**31 - 1)
_u32 = st.integers(0, 2**32 - 1)
_i64 = st.integers(-(2**63), 2**63 - 1)
_texts = st.text(max_size=12)
_blobs = st.binary(max_size=70)
_i32s = st.lists(_i32, max_size=5)

_extras = st.builds(
    ExtraTensorInfo,
    st.sampled_from([0, 0, 1, 2**40]),
    st.none() | _texts,
    st.just(TensorDataLocation.EXTERNAL),
    st.sampled_from(DeviceType),
    st.integers(-128, 127),
)
_allocations = st.builds(AllocationDetails, _u32, _u32, st.sampled_from([0, 0, 3, 2**32 - 1]))
_tensors = st.builds(
    Tensor,
    st.sampled_from(ScalarType),
    st.sampled_from([0, 0, 7, -3]),
    _i32s,
    st.lists(st.integers(0, 255), max_size=5),
    st.booleans(),
    # Indices that point at data come from the program as a whole.
    st.just(0),
    st.none() | _allocations,
    st.integers(0, 127),
    st.sampled_from(TensorShapeDynamism),
    st.none() | _extras,
)
_values = st.builds(
    EValue,
    st.one_of(
        st.builds(Null),
        st.builds(Int, _i64),
        st.builds(Bool, st.booleans()),
        st.builds(Double, st.floats(allow_nan=False)),
        _tensors,
        st.builds(String, _texts),
        st.builds(IntList, st.lists(_i64, max_size=4)),
        st.builds(DoubleList, st.lists(st.floats(allow_nan=False), max_size=4)),
        st.builds(BoolList, st.lists(st.booleans(), max_size=4)),
        st.builds(TensorList, _i32s),
        st.builds(OptionalTensorList, _i32s),
    ),
)
_instructions = st.builds(
    Instruction,
    st.one_of(
        st.builds(KernelCall, _i32, _i32s),
        st.builds(DelegateCall, _i32, _i32s),
        st.builds(MoveCall, _i32, _i32),
        st.builds(JumpFalseCall, _i32, _i32),
        st.builds(FreeCall, _i32),
    ),
)
_frames = st.builds(Frame, _texts, _i32, _texts, _texts)
_chains = st.builds(
    Chain,
    _i32s,
    _i32s,
    st.lists(_instructions, max_size=6),
    st.none() | st.lists(st.builds(FrameList, st.lists(_frames, max_size=3)), max_size=3),
)
_devices = st.builds(
    NonConstBufferDevice, _i32, st.sampled_from(DeviceType), st.integers(-128, 127)
)


@st.composite
def programs(draw: st.DrawFn, *, partial: bool = True) -> Program:
    """Return any program whose indices into data are right (others need not be).

    With ``partial``, tensors may use less than their buffers hold.
    """
    # Few and short, so that equal blobs, empty ones and equal prefixes all come up.
    blobs = draw(st.lists(_blobs, min_size=1, max_size=4))
    blob: SearchStrategy[bytes] = st.sampled_from(blobs) | _blobs
    delegates = [
        BackendDelegateInlineData(data) for data in draw(st.lists(blob, unique=True, max_size=3))
    ]
    constants = [Buffer(b""), *(Buffer(data) for data in draw(st.lists(blob, max_size=4)))]
    mutable = [Buffer(b""), *(Buffer(data) for data in draw(st.lists(blob, max_size=3)))]
    alignments = st.sampled_from([1, 2, 3, 16, 24, 64, 512])
    named = st.lists(st.builds(NamedData, _texts, blob, alignments), max_size=4, unique_by=_key)
    plans = [
        ExecutionPlan(
            draw(_texts),
            draw(st.none() | st.builds(ContainerMetadata, _texts, _texts)),
            draw(st.lists(_values, max_size=6)) + _data_tensors(draw, constants, mutable, partial),
            draw(_i32s),
            draw(_i32s),
            draw(st.lists(_chains, max_size=2)),
            draw(st.lists(st.builds(Operator, _texts, _texts), max_size=3)),
            _delegates(draw, len(delegates)),
            draw(st.lists(_i64, max_size=3)),
            draw(st.none() | st.lists(_devices, max_size=2)),
        )
        for _ in range(draw(st.integers(0, 3)))
    ]
    return Program(draw(_u32), plans, constants, mutable, delegates, draw(named))


def _key(entry: NamedData) -> str:
    return entry.key


def _data_tensors(
    draw: st.DrawFn, constants: list[Buffer], mutable: list[Buffer], partial: bool
) -> list[EValue]:
    """Return tensors that use some of the data, whole or in part."""
    found = []
    for buffers, allocation in ((constants, None), (mutable, AllocationDetails(1, 0))):
        for index, buffer in enumerate(buffers[1:], 1):
            if draw(st.booleans()):
                size = len(bytes(buffer.storage))  # type: ignore[arg-type]
                if partial:
                    size = draw(st.sampled_from([size, 0]))
                tensor = Tensor(
                    ScalarType.BYTE,
                    sizes=[size],
                    dim_order=[0],
                    data_buffer_idx=index,
                    allocation_info=allocation,
                )
                found.append(EValue(tensor))
    return found


def _delegates(draw: st.DrawFn, count: int) -> list[BackendDelegate]:
    if not count:
        return []
    references = st.builds(
        BackendDelegateDataReference, st.just(DataLocation.INLINE), st.integers(0, count - 1)
    )
    specs = st.lists(st.builds(CompileSpec, _texts, _blobs), max_size=2)
    return draw(st.lists(st.builds(BackendDelegate, _texts, references, specs), max_size=3))
