"""Files built to take long by what their numbers mean: nested loops that a schema does not show.

Each takes a number and returns a file that grows with it. Every one of them took time that grew
with the square of the file (or worse) in some version of this package, or in a draft.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from serializer_payloads import payload, relu  # type: ignore[import-not-found]
from serializer_programs import add_delegates, add_program, tensor  # type: ignore[import-not-found]

from lowerdeck import serializer as pte
from lowerdeck.serializer.flatbuffer.wire import PROGRAM_TABLES

Construction = Callable[[int], bytes]
_Change = Callable[[pte.Program, pte.ExecutionPlan, int], object]


def _program(change: _Change) -> Construction:
    def make(count: int) -> bytes:
        program = add_program()
        change(program, program.execution_plan[0], count)
        return pte.serialize_pte(program)

    return make


def _bytes_tensor(size: int, *, at: int | None = None, index: int = 0, memory: int = 1) -> Any:
    return tensor((size,), pte.ScalarType.BYTE, at, index=index, memory=memory)


def _calls(plan: pte.ExecutionPlan, args: list[int], count: int) -> None:
    plan.chains[0].instructions += [pte.Instruction(pte.KernelCall(1, args)) for _ in range(count)]


def unused_constants(program: pte.Program, _: pte.ExecutionPlan, count: int) -> None:
    """Constants of one length that no tensor uses, so that zeros at their ends may be padding."""
    program.constant_buffer += [
        pte.Buffer(struct.pack("<I", i) + b"\1" * 16 + bytes(12)) for i in range(count)
    ]


def unused_zeros(program: pte.Program, _: pte.ExecutionPlan, count: int) -> None:
    """Unused constants that become equal when zeros at their ends are taken away."""
    program.constant_buffer += [pte.Buffer(b"\1" + bytes(i % 64)) for i in range(count)]


def constants_alike(program: pte.Program, _: pte.ExecutionPlan, count: int) -> None:
    """Constants that are equal at both ends and in the middle."""
    blobs = [bytes(80) + struct.pack("<I", i) + bytes(300) for i in range(count)]
    program.constant_buffer += [pte.Buffer(blob) for blob in blobs]


def one_offset(program: pte.Program, plan: pte.ExecutionPlan, count: int) -> None:
    """Constants that all start at one offset, with as many zeros as entries after it."""
    program.constant_buffer += [pte.Buffer(b"\1")] * count + [
        pte.Buffer(b"\1" * count + bytes(count))
    ]
    plan.values.append(_bytes_tensor(0, index=2))


def list_in_calls(_: pte.Program, plan: pte.ExecutionPlan, count: int) -> None:
    """A long list of tensors as an argument of many calls."""
    plan.values.append(pte.EValue(pte.TensorList([0] * count)))
    plan.operators.append(pte.Operator("aten::cat", "out"))
    _calls(plan, [4, 2, 3, 3], count)


def list_of_ints(_: pte.Program, plan: pte.ExecutionPlan, count: int) -> None:
    """A long list of numbers that many calls must find positive."""
    plan.values.append(pte.EValue(pte.IntList([2] * count)))
    plan.values.append(pte.EValue(pte.Bool(False)))
    plan.operators.append(pte.Operator("aten::avg_pool2d", "out"))
    _calls(plan, [0, 4, 4, 4, 5, 5, 2, 3, 3], count)


def list_of_views(_: pte.Program, plan: pte.ExecutionPlan, count: int) -> None:
    """A long list that many calls take, of tensors that a view gives memory among jumps."""
    first = len(plan.values)
    plan.values += [_bytes_tensor(24), _bytes_tensor(24, at=0), pte.EValue(pte.Bool(True))]
    plan.values += [pte.EValue(pte.IntList([])), pte.EValue(pte.TensorList([first] * count))]
    plan.operators += [
        pte.Operator("executorch_prim::et_view", "default"),
        pte.Operator("mine::use", "out"),
    ]
    steps = plan.chains[0].instructions
    for _number in range(count // 2):
        step = len(steps)
        steps.append(pte.Instruction(pte.KernelCall(1, [first + 1, first + 3, first, first])))
        steps.append(pte.Instruction(pte.JumpFalseCall(first + 2, step + 3)))
        steps.append(pte.Instruction(pte.KernelCall(2, [first + 4, 3])))


def free_calls(_: pte.Program, plan: pte.ExecutionPlan, count: int) -> None:
    """Many tensors that are dropped, each of which must be unused."""
    first = len(plan.values)
    plan.values += [_bytes_tensor(4, at=8)] * count
    plan.chains[0].instructions += [pte.Instruction(pte.FreeCall(first + i)) for i in range(count)]


def views_of_fine_writes(_: pte.Program, plan: pte.ExecutionPlan, count: int) -> None:
    """Many unwritten tensors over one memory that many small ones wrote."""
    first = len(plan.values)
    plan.non_const_buffer_sizes.append(count)
    plan.values += [_bytes_tensor(1, at=i, memory=2) for i in range(count)]
    plan.values += [_bytes_tensor(count, at=0, memory=2) for _ in range(count)]
    plan.operators.append(pte.Operator("mine::write", "out"))
    calls = [[first + i] for i in range(count)]
    calls += [[first + count + i, first] for i in range(count)]
    plan.chains[0].instructions += [pte.Instruction(pte.KernelCall(1, args)) for args in calls]


def long_operator_name(_: pte.Program, plan: pte.ExecutionPlan, count: int) -> None:
    """One long name that many operators have, each of them called."""
    plan.operators = [pte.Operator("a" * 4 * count, "out")] * count
    calls = [pte.Instruction(pte.KernelCall(i, [0])) for i in range(count)]
    plan.chains[0].instructions += calls


def named_constants(program: pte.Program, _: pte.ExecutionPlan, count: int) -> None:
    """Named data that are constants too, with zeros before them that may be padding."""
    for index in range(count):
        blob = struct.pack("<I", index + 1) + bytes(60)
        program.constant_buffer.append(pte.Buffer(blob))
        program.named_data.append(pte.NamedData(f"k{index}", blob, 64))


def named_alike(program: pte.Program, _: pte.ExecutionPlan, count: int) -> None:
    """Named data that are equal at both ends and in the middle."""
    blobs = [bytes(80) + struct.pack("<I", i) + bytes(300) for i in range(count)]
    program.named_data += [pte.NamedData(f"k{i}", blob) for i, blob in enumerate(blobs)]


def one_blob_for_all(program: pte.Program, plan: pte.ExecutionPlan, count: int) -> None:
    """Many delegates of one blob, in which XNNPACK's operators are counted."""
    graph = relu()
    # One table, as often as it is named.
    graph["xnodes"] *= count
    _delegated(program, plan, payload(graph), count, [pte.CompileSpec("key", b"y" * count)])


def one_blob_that_needs_others(program: pte.Program, plan: pte.ExecutionPlan, count: int) -> None:
    """Many delegates of one blob that is right, and names many constants that no file brings."""
    graph = relu()
    graph["constant_data"] = [{"size": 4, "named_key": b"absent"}] * count
    _delegated(program, plan, payload(graph), count, [])


def _delegated(
    program: pte.Program,
    plan: pte.ExecutionPlan,
    blob: bytes,
    count: int,
    specs: list[pte.CompileSpec],
) -> None:
    add_delegates(program, blob, backend="XnnpackBackend")
    place = plan.delegates[0].processed
    plan.delegates = [pte.BackendDelegate("XnnpackBackend", place, specs) for _ in range(count)]


def many_methods(program: pte.Program, _: pte.ExecutionPlan, count: int) -> None:
    """Many small methods, each looked up by its name."""
    program.execution_plan += [
        pte.ExecutionPlan(f"m{i}", chains=[pte.Chain()]) for i in range(count)
    ]


def alignments(program: pte.Program, _: pte.ExecutionPlan, count: int) -> None:
    """One blob under many keys, for each of which another alignment was asked."""
    program.named_data += [pte.NamedData(f"k{i}", b"one", 1 << (i % 4)) for i in range(count)]


def overlapping_vtables(count: int) -> bytes:
    """Return a file in which each value has a vtable of its own, which claims all after it."""
    values = [_bytes_tensor(size) for size in range(count)]
    data = bytearray(
        pte.serialize_pte(pte.Program(execution_plan=[pte.ExecutionPlan("f", values=values)]))
    )
    file = pte.PteFile(bytes(data))
    positions = file.decoder.reader.tables(file.plan_tables[0].values, "values")
    for number, position in enumerate(positions):
        (back,) = struct.unpack_from("<i", data, position)
        _, size, kind, value = struct.unpack_from("<4H", data, position - back)
        length = min(8 * (count - number), 1 << 15)
        struct.pack_into("<i", data, position, position - len(data))
        data += struct.pack("<4H", length, size, kind, value)
    return bytes(data)


def overlapping_segments(count: int) -> bytes:
    """Return a file of which each segment of a named blob is (nearly) all that is after it."""
    program = add_program()
    program.named_data = [
        pte.NamedData(f"k{i}", struct.pack("<I", i) + bytes(12), 1) for i in range(count)
    ]
    data = bytearray(pte.serialize_pte(program, segment_alignment=1))
    file = pte.PteFile(bytes(data))
    reader = file.decoder.reader
    end = file.header.segment_data_size  # type: ignore[union-attr]
    names = [field.name for field in PROGRAM_TABLES["DataSegment"]]
    for position in reader.tables(file.decoder.segment_table, "segments"):
        offset, _ = reader.fields("DataSegment", position)
        vtable = position - struct.unpack_from("<i", data, position)[0]
        entry = vtable + 4 + 2 * names.index("size")
        (at,) = struct.unpack_from("<H", data, entry)
        struct.pack_into("<Q", data, position + at, end - offset)
    return bytes(data)


_CHANGES: tuple[_Change, ...] = (
    *(unused_constants, unused_zeros, constants_alike, one_offset),
    *(list_in_calls, list_of_ints, list_of_views, free_calls),
    *(views_of_fine_writes, long_operator_name, named_constants, named_alike),
    *(one_blob_for_all, one_blob_that_needs_others, many_methods, alignments),
)
ATTACKS: dict[str, Construction] = {
    **{change.__name__: _program(change) for change in _CHANGES},
    "overlapping_vtables": overlapping_vtables,
    "overlapping_segments": overlapping_segments,
}
