"""Programs for the tests: one small by hand, and any that hypothesis can think of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from lowerdeck import serializer as pte


def add_program() -> pte.Program:
    """Return ``forward(x) = x + weight``, with every field in order."""
    values = [tensor((2, 3), at=0), tensor((2, 3), index=1), pte.Int(1), tensor((2, 3), at=32)]
    step = ("aten::add.out", [0, 1, 2, 3, 3])
    made = program(values, step, constants=[bytes(range(24))], memory=64, inputs=[0], outputs=[3])
    made.execution_plan[0].container_meta_type = pte.ContainerMetadata("[1]", "[2]")
    return made


def tensor(
    sizes: Sequence[int] = (2,),
    kind: pte.ScalarType = pte.ScalarType.FLOAT,
    at: int | None = None,
    *,
    memory: int = 1,
    index: int = 0,
    name: str | None = None,
) -> pte.EValue:
    """Return a contiguous tensor.

    Args:
        sizes: Its sizes.
        kind: Its type.
        at: The offset of its planned memory.
        memory: The id of that memory.
        index: The buffer of its data.
        name: Its fully qualified name.
    """
    return pte.EValue(
        pte.Tensor(
            kind,
            sizes=list(sizes),
            dim_order=list(range(len(sizes))),
            data_buffer_idx=index,
            allocation_info=None if at is None else pte.AllocationDetails.at(memory, at),
            extra_tensor_info=pte.ExtraTensorInfo(fully_qualified_name=name) if name else None,
        )
    )


def program(
    values: Sequence[Any],
    *steps: Any,
    constants: Sequence[bytes] = (),
    memory: int = 1024,
    **fields: Any,
) -> pte.Program:
    """Return a program of one method ``forward`` with one chain.

    Args:
        values: Values, or what they hold.
        steps: Arguments of instructions; ``("aten::add.out", [0, 1])`` is a call of a kernel.
        constants: The bytes of buffers from 1.
        memory: The size of planned memory 1.
        fields: Other fields of the method.
    """
    names = list(dict.fromkeys(step[0] for step in steps if isinstance(step, tuple)))
    calls = [
        pte.KernelCall(names.index(step[0]), list(step[1])) if isinstance(step, tuple) else step
        for step in steps
    ]
    plan = pte.ExecutionPlan(
        "forward",
        values=[one if isinstance(one, pte.EValue) else pte.EValue(one) for one in values],
        chains=[pte.Chain(instructions=[pte.Instruction(call) for call in calls])],
        operators=[pte.Operator(*name.partition(".")[::2]) for name in names],
        non_const_buffer_sizes=[0, memory],
    )
    for name, items in fields.items():
        setattr(plan, name, list(items))
    buffers = [pte.Buffer(data) for data in (b"", *constants)]
    return pte.Program(execution_plan=[plan], constant_buffer=buffers)


def add_delegates(
    changed: pte.Program, *blobs: bytes, backend: str = "Backend", specs: Any = ()
) -> pte.Program:
    """Give the first method of a program delegates that are not called, and return it."""
    for blob in blobs:
        place = pte.BackendDelegateDataReference(
            pte.DataLocation.INLINE, len(changed.backend_delegate_data)
        )
        changed.backend_delegate_data.append(pte.BackendDelegateInlineData(blob))
        changed.execution_plan[0].delegates.append(
            pte.BackendDelegate(backend, place, [pte.CompileSpec(*spec) for spec in specs])
        )
    return changed


TENSOR = pte.BundledTensor(pte.ScalarType.CHAR, [4, 6], [0, 1], bytes(range(100, 124)))
BUNDLE = pte.BundledProgram(
    pte.serialize_pte(add_program()),
    [
        pte.MethodTestSuite(
            "forward",
            [
                pte.MethodTestCase(
                    [TENSOR, pte.Int(-3), pte.Bool(True), pte.Double(0.5)], [TENSOR]
                ),
                pte.MethodTestCase([pte.Int(0), pte.Bool(False), pte.Double(0.0)], []),
            ],
        ),
        pte.MethodTestSuite("other", []),
    ],
)

_i32 = st.integers(-(2**31), 2**31 - 1)
_u32 = st.integers(0, 2**32 - 1)
_i64 = st.integers(-(2**63), 2**63 - 1)
_texts = st.text(max_size=12)
_blobs = st.binary(max_size=70)
_i32s = st.lists(_i32, max_size=5)

_extras = st.builds(
    pte.ExtraTensorInfo,
    st.sampled_from([0, 0, 1, 2**40]),
    st.none() | _texts,
    st.just(pte.TensorDataLocation.EXTERNAL),
    st.sampled_from(pte.DeviceType),
    st.integers(-128, 127),
)
_allocations = st.builds(pte.AllocationDetails, _u32, _u32, st.sampled_from([0, 0, 3, 2**32 - 1]))
_tensors = st.builds(
    pte.Tensor,
    st.sampled_from(pte.ScalarType),
    st.sampled_from([0, 0, 7, -3]),
    _i32s,
    st.lists(st.integers(0, 255), max_size=5),
    st.booleans(),
    # Indices that point at data come from the program as a whole.
    st.just(0),
    st.none() | _allocations,
    st.integers(0, 127),
    st.sampled_from(pte.TensorShapeDynamism),
    st.none() | _extras,
)
_values = st.builds(
    pte.EValue,
    st.one_of(
        st.builds(pte.Null),
        st.builds(pte.Int, _i64),
        st.builds(pte.Bool, st.booleans()),
        st.builds(pte.Double, st.floats(allow_nan=False)),
        _tensors,
        st.builds(pte.String, _texts),
        st.builds(pte.IntList, st.lists(_i64, max_size=4)),
        st.builds(pte.DoubleList, st.lists(st.floats(allow_nan=False), max_size=4)),
        st.builds(pte.BoolList, st.lists(st.booleans(), max_size=4)),
        st.builds(pte.TensorList, _i32s),
        st.builds(pte.OptionalTensorList, _i32s),
    ),
)
_instructions = st.builds(
    pte.Instruction,
    st.one_of(
        st.builds(pte.KernelCall, _i32, _i32s),
        st.builds(pte.DelegateCall, _i32, _i32s),
        st.builds(pte.MoveCall, _i32, _i32),
        st.builds(pte.JumpFalseCall, _i32, _i32),
        st.builds(pte.FreeCall, _i32),
    ),
)
_frames = st.builds(pte.Frame, _texts, _i32, _texts, _texts)
_chains = st.builds(
    pte.Chain,
    _i32s,
    _i32s,
    st.lists(_instructions, max_size=6),
    st.none() | st.lists(st.builds(pte.FrameList, st.lists(_frames, max_size=3)), max_size=3),
)
_devices = st.builds(
    pte.NonConstBufferDevice, _i32, st.sampled_from(pte.DeviceType), st.integers(-128, 127)
)


@st.composite
def programs(draw: st.DrawFn, *, partial: bool = True) -> pte.Program:
    """Return any program whose indices into data are right (others need not be).

    With ``partial``, tensors may use less than their buffers hold.
    """
    # Few and short, so that equal blobs, empty ones and equal prefixes all come up.
    blobs = draw(st.lists(_blobs, min_size=1, max_size=4))
    blob: SearchStrategy[bytes] = st.sampled_from(blobs) | _blobs
    delegates = [
        pte.BackendDelegateInlineData(data)
        for data in draw(st.lists(blob, unique=True, max_size=3))
    ]
    constants = [pte.Buffer(b""), *(pte.Buffer(data) for data in draw(st.lists(blob, max_size=4)))]
    mutable = [pte.Buffer(b""), *(pte.Buffer(data) for data in draw(st.lists(blob, max_size=3)))]
    alignments = st.sampled_from([1, 2, 3, 16, 24, 64, 512])
    named = st.lists(
        st.builds(pte.NamedData, _texts, blob, alignments), max_size=4, unique_by=_key
    )
    plans = [
        pte.ExecutionPlan(
            draw(_texts),
            draw(st.none() | st.builds(pte.ContainerMetadata, _texts, _texts)),
            draw(st.lists(_values, max_size=6)) + _data_tensors(draw, constants, mutable, partial),
            draw(_i32s),
            draw(_i32s),
            draw(st.lists(_chains, max_size=2)),
            draw(st.lists(st.builds(pte.Operator, _texts, _texts), max_size=3)),
            _delegates(draw, len(delegates)),
            draw(st.lists(_i64, max_size=3)),
            draw(st.none() | st.lists(_devices, max_size=2)),
        )
        for _ in range(draw(st.integers(0, 3)))
    ]
    return pte.Program(draw(_u32), plans, constants, mutable, delegates, draw(named))


def _key(entry: pte.NamedData) -> str:
    return entry.key


def _data_tensors(
    draw: st.DrawFn, constants: list[pte.Buffer], mutable: list[pte.Buffer], partial: bool
) -> list[pte.EValue]:
    """Return tensors that use some of the data, whole or in part."""
    found = []
    for buffers, allocation in ((constants, None), (mutable, pte.AllocationDetails(1, 0))):
        for index, buffer in enumerate(buffers[1:], 1):
            if draw(st.booleans()):
                size = len(bytes(buffer.storage))  # type: ignore[arg-type]
                if partial:
                    size = draw(st.sampled_from([size, 0]))
                tensor = pte.Tensor(
                    pte.ScalarType.BYTE,
                    sizes=[size],
                    dim_order=[0],
                    data_buffer_idx=index,
                    allocation_info=allocation,
                )
                found.append(pte.EValue(tensor))
    return found


def _delegates(draw: st.DrawFn, count: int) -> list[pte.BackendDelegate]:
    if not count:
        return []
    references = st.builds(
        pte.BackendDelegateDataReference,
        st.just(pte.DataLocation.INLINE),
        st.integers(0, count - 1),
    )
    specs = st.lists(st.builds(pte.CompileSpec, _texts, _blobs), max_size=2)
    return draw(st.lists(st.builds(pte.BackendDelegate, _texts, references, specs), max_size=3))


def named_data(external: Mapping[str, pte.ExternalData]) -> pte.NamedDataStoreOutput:
    """Return external data as the named data of a store."""
    store = pte.NamedDataStore()
    for tag, data in external.items():
        for key, entry in data.entries.items():
            store.add_named_data(key, entry.data, entry.alignment, tag, entry.tensor_layout)
    return store.get_named_data_store_output()
