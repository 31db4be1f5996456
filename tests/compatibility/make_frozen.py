"""Write the frozen files of today, once: they are never made again, for they prove compatibility.

Run from the root of the repository: ``python tests/compatibility/make_frozen.py DATE``. It refuses
to touch a folder that exists.
"""

from __future__ import annotations

import sys
from pathlib import Path

from lowerdeck import serializer as pte

HERE = Path(__file__).resolve().parent / "serializer"


def everything() -> pte.Program:
    """Return a program that uses every table of the schema."""
    place = pte.AllocationDetails.at

    def tensor(index: int = 0, where: pte.AllocationDetails | None = None) -> pte.Tensor:
        return pte.Tensor(
            pte.ScalarType.FLOAT,
            sizes=[2, 3],
            dim_order=[0, 1],
            data_buffer_idx=index,
            allocation_info=where,
        )

    state = tensor(1, place(2, 0))
    state.extra_tensor_info = pte.ExtraTensorInfo(fully_qualified_name="state")
    values = [
        pte.EValue(tensor(0, place(1, 0))),
        pte.EValue(tensor(1)),
        pte.EValue(pte.Int(1)),
        pte.EValue(tensor(0, place(1, 32))),
        pte.EValue(pte.Null()),
        pte.EValue(pte.Bool(True)),
        pte.EValue(pte.Double(0.5)),
        pte.EValue(pte.String("naïve")),
        pte.EValue(pte.IntList([2, 2])),
        pte.EValue(pte.DoubleList([1.5, -2.0])),
        pte.EValue(pte.BoolList([True, False])),
        pte.EValue(pte.TensorList([0, 3])),
        pte.EValue(pte.OptionalTensorList([-1, 0])),
        pte.EValue(state),
    ]
    steps = [
        pte.Instruction(pte.KernelCall(0, [0, 1, 2, 3, 3])),
        pte.Instruction(pte.JumpFalseCall(5, 4)),
        pte.Instruction(pte.MoveCall(3, 0)),
        pte.Instruction(pte.DelegateCall(0, [0, 3])),
    ]
    trace = [pte.FrameList([pte.Frame("model.py", 7, "forward", "x + w")])] * len(steps)
    plan = pte.ExecutionPlan(
        "forward",
        pte.ContainerMetadata("[1]", "[2]"),
        values,
        [0],
        [3],
        [pte.Chain([], [], steps, trace)],
        [pte.Operator("aten::add", "out")],
        [
            pte.BackendDelegate(
                "Backend",
                pte.BackendDelegateDataReference(pte.DataLocation.INLINE, 0),
                [pte.CompileSpec("speed", b"fast")],
            )
        ],
        [0, 64, 24],
    )
    constant = pte.ExecutionPlan(
        "get_size",
        pte.ContainerMetadata("", "[3]"),
        [pte.EValue(pte.Int(128))],
        [],
        [0],
        [pte.Chain()],
    )
    return pte.Program(
        0,
        [plan, constant],
        [pte.Buffer(b""), pte.Buffer(bytes(range(24)))],
        [pte.Buffer(b""), pte.Buffer(bytes(range(100, 124)))],
        [pte.BackendDelegateInlineData(b"delegate blob")],
        [pte.NamedData("tied", bytes(range(24)), 16), pte.NamedData("own", b"named bytes", 64)],
    )


def main(date: str) -> None:
    """Write the files of one date."""
    folder = HERE / date
    folder.mkdir(parents=True)
    pte.write_pte(everything(), folder / "segments.pte")
    pte.write_pte(
        everything(),
        folder / "inline.pte",
        extract_delegate_segments=False,
        delegate_alignment=64,
        constant_tensor_alignment=32,
    )
    pte.write_pte(
        pte.Program(execution_plan=[everything().execution_plan[1]]), folder / "flatbuffer.pte"
    )
    layout = pte.TensorLayout(pte.ScalarType.FLOAT, [2, 3], [0, 1])
    pte.write_ptd(
        {
            "w": pte.ExternalEntry(bytes(range(24)), layout, 16),
            "blob": pte.ExternalEntry(b"opaque"),
        },
        folder / "data.ptd",
    )


if __name__ == "__main__":
    main(sys.argv[1])
