"""Instructions and their stack traces as records."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

from lowerdeck.serializer.errors import ProgramError
from lowerdeck.serializer.flatbuffer.assembly import Assembly, Rank
from lowerdeck.serializer.flatbuffer.packing import int_vector
from lowerdeck.serializer.flatbuffer.sections import Records
from lowerdeck.serializer.flatbuffer.union_record import start_union_record
from lowerdeck.serializer.flatbuffer.wire import INSTRUCTION_ARGUMENTS, PROGRAM_TABLES
from lowerdeck.serializer.pte import schema

_Encoder = Callable[[Any], int]


class ChainEncoder:
    """Turns instructions and stack traces into references to stored ones."""

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly
        self._encoders: dict[type, _Encoder] = {}
        self._frames: dict[schema.Frame, int] = {}
        self._frame_lists: dict[tuple[schema.Frame, ...], int] = {}
        self._frame_records: tuple[Records, list[list[int]]] | None = None
        self._frame_list_records: tuple[Records, list[int]] | None = None

    def add_instructions(self, steps: Sequence[schema.Instruction], where: str) -> list[int]:
        """Return a reference for each instruction.

        Args:
            steps: The instructions of one chain.
            where: The chain, for messages.

        Raises:
            ProgramError: An instruction is none of the union, or a number does not fit.
        """
        encoders = self._encoders
        references: list[int] = []
        append = references.append
        try:
            for step in steps:
                call = step.instr_args
                append((encoders.get(type(call)) or self._start(type(call)))(call))
        except (AttributeError, TypeError, struct.error, ProgramError) as error:
            index = len(references)
            raise ProgramError(
                f"{where}.instructions[{index}]: found {steps[index]!r}, which no field holds: "
                f"{error}"
            ) from error
        return references

    def add_frame_lists(self, traces: Sequence[schema.FrameList]) -> list[int]:
        """Return a reference for each stack trace; equal frames and traces are stored once."""
        return [self._frame_list(tuple(trace.items)) for trace in traces]

    def _start(self, kind: type) -> _Encoder:
        if kind.__name__ not in INSTRUCTION_ARGUMENTS:
            raise ProgramError(f"expected one of {', '.join(INSTRUCTION_ARGUMENTS[1:])}")
        fields = PROGRAM_TABLES[kind.__name__]
        offsets = {field.name: 4 + 4 * index for index, field in enumerate(fields)}
        records = start_union_record(
            self._assembly,
            *("Instruction", "instr_args_type", "instr_args"),
            INSTRUCTION_ARGUMENTS.index(kind.__name__),
            *(kind.__name__, 4 + 4 * len(fields), offsets),
        )
        columns = [
            records.references()
            if field.is_offset
            else records.numbers("i", f"{kind.__name__}.{field.name}")
            for field in fields
        ]
        made = _encoder(kind, records, columns, self._assembly)
        self._encoders[kind] = made
        return made

    def _frame_list(self, frames: tuple[schema.Frame, ...]) -> int:
        found = self._frame_lists.get(frames)
        if found is None:
            assembly = self._assembly
            if self._frame_list_records is None:
                records = assembly.records(Rank.PARENTS)
                records.table(assembly.skeleton.vtable("FrameList", 8, {"items": 4}))
                self._frame_list_records = records, records.references()
            records, column = self._frame_list_records
            column.append(assembly.inner_vectors.add([self._frame(frame) for frame in frames]))
            found = self._frame_lists[frames] = records.append()
        return found

    def _frame(self, frame: schema.Frame) -> int:
        found = self._frames.get(frame)
        if found is None:
            records, (filenames, lines, names, contexts) = (
                self._frame_records or self._start_frames()
            )
            add_string = self._assembly.words.add_string
            filenames.append(add_string(frame.filename))
            lines.append(frame.lineno)
            names.append(add_string(frame.name))
            contexts.append(add_string(frame.context))
            found = self._frames[frame] = records.append()
        return found

    def _start_frames(self) -> tuple[Records, list[list[int]]]:
        fields = PROGRAM_TABLES["Frame"]
        offsets = {field.name: 4 + 4 * index for index, field in enumerate(fields)}
        records = self._assembly.records(Rank.CHILDREN)
        records.table(self._assembly.skeleton.vtable("Frame", 4 + 4 * len(fields), offsets))
        columns = [
            records.references() if field.is_offset else records.numbers("i", "Frame.lineno")
            for field in fields
        ]
        self._frame_records = records, columns
        return self._frame_records


def _encoder(
    kind: type, records: Records, columns: list[list[int]], assembly: Assembly
) -> _Encoder:
    """Return the function that stores one kind of instruction."""
    # One function for each kind, its columns bound once: instructions come by the thousand.
    append, add = records.append, assembly.words.add
    first = columns[0].append
    second = columns[-1].append

    def kernel(call: schema.KernelCall) -> int:
        first(call.op_index)
        second(add(int_vector(call.args)))
        return append()

    def delegate(call: schema.DelegateCall) -> int:
        first(call.delegate_index)
        second(add(int_vector(call.args)))
        return append()

    def move(call: schema.MoveCall) -> int:
        first(call.move_from)
        second(call.move_to)
        return append()

    def jump(call: schema.JumpFalseCall) -> int:
        first(call.cond_value_index)
        second(call.destination_instruction)
        return append()

    def free(call: schema.FreeCall) -> int:
        first(call.value_index)
        return append()

    encoders: dict[type, _Encoder] = {
        schema.KernelCall: kernel,
        schema.DelegateCall: delegate,
        schema.MoveCall: move,
        schema.JumpFalseCall: jump,
        schema.FreeCall: free,
    }
    return encoders[kind]
