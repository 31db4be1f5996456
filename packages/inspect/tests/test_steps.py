"""Files built to take long take steps in proportion to their size, whatever their numbers mean."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import pytest
from inspect_steps import StepCounter  # type: ignore[import-not-found]

from lowerdeck import inspect
from lowerdeck import serializer as pte
from lowerdeck.inspect.commands.inspect import summary_lines
from lowerdeck.inspect.commands.summary import summarise
from lowerdeck.inspect.report.changes import method_changes, stored_changes
from lowerdeck.inspect.report.file_map import all_stored
from lowerdeck.inspect.report.pairing import pair_rows
from lowerdeck.serializer.pte.schema import PROGRAM_FORMAT
from lowerdeck_files.payloads import graph, node, payload, value
from lowerdeck_files.programs import add_delegates, add_program, tensor

_SIZE = 12_000
_DOUBLED = 2.3
_STEPS_PER_BYTE = 320
_MOST_DOUBLINGS = 6


def _bytes_tensor(size: int, *, at: int | None = None, index: int = 0, memory: int = 1) -> Any:
    return tensor((size,), pte.ScalarType.BYTE, at, index=index, memory=memory)


def unused_constants(program: pte.Program, _: pte.ExecutionPlan, count: int) -> None:
    """Constants of one length that no tensor uses, so that zeros at their ends may be padding."""
    program.constant_buffer += [
        pte.Buffer(struct.pack("<I", i) + b"\1" * 16 + bytes(12)) for i in range(count)
    ]


def one_offset(program: pte.Program, plan: pte.ExecutionPlan, count: int) -> None:
    """Constants that all start at one offset, with as many zeros as entries after it."""
    program.constant_buffer += [pte.Buffer(b"\1")] * count + [
        pte.Buffer(b"\1" * count + bytes(count))
    ]
    plan.values.append(_bytes_tensor(0, index=2))


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


def free_calls(_: pte.Program, plan: pte.ExecutionPlan, count: int) -> None:
    """Many tensors that are dropped, each of which must be unused."""
    first = len(plan.values)
    plan.values += [_bytes_tensor(4, at=8)] * count
    plan.chains[0].instructions += [pte.Instruction(pte.FreeCall(first + i)) for i in range(count)]


def named_constants(program: pte.Program, _: pte.ExecutionPlan, count: int) -> None:
    """Named data that are constants too, equal at both ends and in the middle."""
    for index in range(count):
        blob = bytes(80) + struct.pack("<I", index + 1) + bytes(300)
        program.constant_buffer.append(pte.Buffer(blob))
        program.named_data.append(pte.NamedData(f"k{index}", blob, 64))


def one_payload_for_all(program: pte.Program, plan: pte.ExecutionPlan, count: int) -> None:
    """Many delegates of one blob, which names many constants and lists one table many times."""
    root = graph([value(0), value(1)], _nodes(1) * count, [{"size": 4, "named_key": b"k"}] * count)
    add_delegates(program, payload(root), backend="XnnpackBackend")
    place = plan.delegates[0].processed
    plan.delegates = [pte.BackendDelegate("XnnpackBackend", place, []) for _ in range(count)]


def _nodes(count: int) -> list[Any]:
    return [node(pte.XnnOperator.ABS, input_id=n, output_id=n + 1) for n in reversed(range(count))]


def payload_in_reverse(program: pte.Program, _: pte.ExecutionPlan, count: int) -> None:
    """A payload of nodes that each wait for the next."""
    values = [value(n) for n in range(count + 1)]
    add_delegates(program, payload(graph(values, _nodes(count))), backend="XnnpackBackend")


def many_methods(program: pte.Program, _: pte.ExecutionPlan, count: int) -> None:
    """Many small methods, each looked up by its name."""
    program.execution_plan += [
        pte.ExecutionPlan(f"m{i}", chains=[pte.Chain()]) for i in range(count)
    ]


def one_file(change: Callable[[pte.Program, pte.ExecutionPlan, int], object], count: int) -> bytes:
    program = add_program()
    change(program, program.execution_plan[0], count)
    return pte.serialize_pte(program)


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
    names = [field.name for field in PROGRAM_FORMAT.tables["DataSegment"]]
    for position in reader.tables(file.decoder.segment_table, "segments"):
        offset, _ = reader.fields("DataSegment", position)
        vtable = position - struct.unpack_from("<i", data, position)[0]
        entry = vtable + 4 + 2 * names.index("size")
        (at,) = struct.unpack_from("<H", data, entry)
        struct.pack_into("<Q", data, position + at, end - offset)
    return bytes(data)


_CHANGES = (
    *(unused_constants, one_offset, list_of_views, views_of_fine_writes, free_calls),
    *(named_constants, one_payload_for_all, payload_in_reverse, many_methods),
)
ATTACKS: dict[str, Callable[[int], bytes]] = {
    **{change.__name__: lambda n, change=change: one_file(change, n) for change in _CHANGES},  # type: ignore[misc]
    "overlapping_segments": overlapping_segments,
}


def _inspect(data: bytes) -> None:
    summary = summarise(pte.PteFile(data))
    list(summary_lines("file", summary))
    json.dumps(summary)


def _differ(data: bytes) -> None:
    program = pte.deserialize_pte(data)
    other = pte.Program(execution_plan=program.execution_plan[:1])
    method_changes(program, other)
    stored_changes(program, other)


def _look_at_everything(data: bytes) -> None:
    file = pte.PteFile(data)
    list(all_stored(file.program()))
    for name in dir(pte.PteFile):
        if isinstance(getattr(pte.PteFile, name), property):
            getattr(file, name)


_OPERATIONS: dict[str, Callable[[bytes], object]] = {
    "read": pte.deserialize_pte,
    "verify": lambda data: pte.verify_pte(data, on_hazard=id),
    "inspect": _inspect,
    "report": lambda data: inspect.html_report(pte.PteFile(data)),
    "diff": _differ,
    "look": _look_at_everything,
    "rewrite": lambda data: pte.serialize_pte(pte.deserialize_pte(data)),
}


def _count_for(make: Callable[[int], bytes], size: int) -> int:
    """Return the number for which a construction has about a size."""
    growth = (len(make(256)) - len(make(128))) / 128
    return max(int(size / growth), 16) // 8 * 8


@pytest.mark.parametrize("name", ATTACKS)
def test_twice_the_file_takes_twice_the_steps(name: str) -> None:
    make = ATTACKS[name]
    count = _count_for(make, _SIZE)
    files = [make(count)]
    steps = {
        what: [StepCounter().count(lambda: do(files[0]), pte.FormatError, pte.ProgramError)]  # noqa: B023
        for what, do in _OPERATIONS.items()
    }
    # What refers to one thing many times may grow faster, until the limit on that ends it:
    # within the bound a byte, and not for ever.
    growing = list(_OPERATIONS)
    while growing:
        files.append(make(count << len(files)))
        for what in growing:
            do = _OPERATIONS[what]
            now = StepCounter().count(lambda: do(files[-1]), pte.FormatError, pte.ProgramError)  # noqa: B023
            steps[what].append(now)
            assert now <= _STEPS_PER_BYTE * len(files[-1]), f"{what}: {now} steps"
        growth = len(files[-1]) / len(files[-2]) / 2
        growing = [
            what for what in growing if steps[what][-1] > _DOUBLED * growth * steps[what][-2]
        ]
        told = {what: steps[what] for what in growing}
        assert len(files) < _MOST_DOUBLINGS or not growing, f"{told} for {list(map(len, files))}"


def test_pairing_takes_steps_in_proportion_to_its_items() -> None:
    # Each split leaves one item that occurs once, at the very end of what is left.
    def peeled(count: int) -> list[list[int]]:
        pairs = [number for i in range(count, 0, -1) for number in (i + 1, i)]
        return [[-1, *pairs, -2], [-3, *pairs, -4]]

    counts = [StepCounter().count(lambda: pair_rows(*peeled(n))) for n in (2000, 4000)]  # noqa: B023
    assert counts[1] <= _DOUBLED * counts[0]
