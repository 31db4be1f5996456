"""Write the frozen files of today, once: they are never made again, for they prove compatibility.

Run from the root of the repository: ``python tests/compatibility/make_frozen.py DATE``. It refuses
to touch a folder that exists.
"""

from __future__ import annotations

import sys
from pathlib import Path

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
    Double,
    DoubleList,
    EValue,
    ExecutionPlan,
    ExternalEntry,
    ExtraTensorInfo,
    Frame,
    FrameList,
    Instruction,
    Int,
    IntList,
    JumpFalseCall,
    KernelCall,
    MoveCall,
    NamedData,
    Null,
    Operator,
    OptionalTensorList,
    Program,
    ScalarType,
    String,
    Tensor,
    TensorLayout,
    TensorList,
    write_ptd,
    write_pte,
)

HERE = Path(__file__).resolve().parent / "serializer"


def everything() -> Program:
    """Return a program that uses every table of the schema."""
    place = AllocationDetails.at

    def tensor(index: int = 0, where: AllocationDetails | None = None) -> Tensor:
        return Tensor(
            ScalarType.FLOAT,
            sizes=[2, 3],
            dim_order=[0, 1],
            data_buffer_idx=index,
            allocation_info=where,
        )

    state = tensor(1, place(2, 0))
    state.extra_tensor_info = ExtraTensorInfo(fully_qualified_name="state")
    values = [
        EValue(tensor(0, place(1, 0))),
        EValue(tensor(1)),
        EValue(Int(1)),
        EValue(tensor(0, place(1, 32))),
        EValue(Null()),
        EValue(Bool(True)),
        EValue(Double(0.5)),
        EValue(String("naïve")),
        EValue(IntList([2, 2])),
        EValue(DoubleList([1.5, -2.0])),
        EValue(BoolList([True, False])),
        EValue(TensorList([0, 3])),
        EValue(OptionalTensorList([-1, 0])),
        EValue(state),
    ]
    steps = [
        Instruction(KernelCall(0, [0, 1, 2, 3, 3])),
        Instruction(JumpFalseCall(5, 4)),
        Instruction(MoveCall(3, 0)),
        Instruction(DelegateCall(0, [0, 3])),
    ]
    trace = [FrameList([Frame("model.py", 7, "forward", "x + w")])] * len(steps)
    plan = ExecutionPlan(
        "forward",
        ContainerMetadata("[1]", "[2]"),
        values,
        [0],
        [3],
        [Chain([], [], steps, trace)],
        [Operator("aten::add", "out")],
        [
            BackendDelegate(
                "Backend",
                BackendDelegateDataReference(DataLocation.INLINE, 0),
                [CompileSpec("speed", b"fast")],
            )
        ],
        [0, 64, 24],
    )
    constant = ExecutionPlan(
        "get_size", ContainerMetadata("", "[3]"), [EValue(Int(128))], [], [0], [Chain()]
    )
    return Program(
        0,
        [plan, constant],
        [Buffer(b""), Buffer(bytes(range(24)))],
        [Buffer(b""), Buffer(bytes(range(100, 124)))],
        [BackendDelegateInlineData(b"delegate blob")],
        [NamedData("tied", bytes(range(24)), 16), NamedData("own", b"named bytes", 64)],
    )


def main(date: str) -> None:
    """Write the files of one date."""
    folder = HERE / date
    folder.mkdir(parents=True)
    write_pte(everything(), folder / "segments.pte")
    write_pte(
        everything(),
        folder / "inline.pte",
        extract_delegate_segments=False,
        delegate_alignment=64,
        constant_tensor_alignment=32,
    )
    write_pte(Program(execution_plan=[everything().execution_plan[1]]), folder / "flatbuffer.pte")
    layout = TensorLayout(ScalarType.FLOAT, [2, 3], [0, 1])
    write_ptd(
        {"w": ExternalEntry(bytes(range(24)), layout, 16), "blob": ExternalEntry(b"opaque")},
        folder / "data.ptd",
    )


if __name__ == "__main__":
    main(sys.argv[1])
