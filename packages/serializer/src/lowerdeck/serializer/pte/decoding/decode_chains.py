"""Chains, instructions and stack traces, decoded from their tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lowerdeck.serializer.errors import EnumError, MissingFieldError
from lowerdeck.serializer.flatbuffer.limits import LONG_ENTRY_COST, OBJECT_COST, SHORT_LIST
from lowerdeck.serializer.flatbuffer.tables import TableReader
from lowerdeck.serializer.flatbuffer.wire import INSTRUCTION_ARGUMENTS
from lowerdeck.serializer.pte import schema


class ChainDecoder:
    """Makes chains from positions of their tables."""

    def __init__(self, reader: TableReader) -> None:
        self._reader = reader
        self._read_instruction = reader.table("Instruction")
        self._frames: dict[int, schema.Frame] = {}
        self._kinds: tuple[Callable[[int], Any] | None, ...] = (
            None,
            self._call_of("KernelCall"),
            self._call_of("DelegateCall"),
            self._numbers_of("MoveCall"),
            self._numbers_of("JumpFalseCall"),
            self._numbers_of("FreeCall"),
        )

    def chain(self, position: int) -> schema.Chain:
        """Return the chain at ``position``."""
        reader = self._reader
        inputs, outputs, instructions, trace = reader.fields("Chain", position)
        if not instructions:
            raise MissingFieldError("found no vector", field="Chain.instructions", offset=position)
        reader.spend(OBJECT_COST, "Chain", position)
        return schema.Chain(
            reader.scalars(inputs, "i32", "Chain.inputs"),
            reader.scalars(outputs, "i32", "Chain.outputs"),
            [self.instruction(at) for at in reader.tables(instructions, "Chain.instructions")],
            [self._frame_list(at) for at in reader.tables(trace, "Chain.stacktrace")]
            if trace
            else None,
        )

    def instruction(self, position: int) -> schema.Instruction:
        """Return the instruction at ``position``."""
        number, call = self._read_instruction(position)
        kind = self._kinds[number] if number < len(self._kinds) else None
        if kind is None:
            raise EnumError(
                f"found kind {number}, expected 1 to {len(INSTRUCTION_ARGUMENTS) - 1}",
                field="Instruction.instr_args_type",
                offset=position,
            )
        if not call:
            raise MissingFieldError(
                "found no call", field="Instruction.instr_args", offset=position
            )
        self._reader.spend(OBJECT_COST, "Instruction", position)
        return schema.Instruction(kind(call))

    def _call_of(self, name: str) -> Callable[[int], Any]:
        reader, made, field = self._reader, getattr(schema, name), f"{name}.args"
        read = reader.table(name)

        def decode(position: int) -> Any:
            index, args = read(position)
            if not args:
                raise MissingFieldError("found no vector", field=field, offset=position)
            return made(index, reader.scalars(args, "i32", field))

        return decode

    def _numbers_of(self, name: str) -> Callable[[int], Any]:
        read, made = self._reader.table(name), getattr(schema, name)
        return lambda position: made(*read(position))

    def _frame_list(self, position: int) -> schema.FrameList:
        (items,) = self._reader.fields("FrameList", position)
        frames = list(self._reader.tables(items, "FrameList.items"))
        deep = max(len(frames) - SHORT_LIST, 0)
        self._reader.spend(OBJECT_COST + LONG_ENTRY_COST * deep, "FrameList", position)
        return schema.FrameList([self._frame(at) for at in frames])

    def _frame(self, position: int) -> schema.Frame:
        # Frames cannot be changed, so one object may stand for all that share its bytes.
        found = self._frames.get(position)
        if found is None:
            filename, lineno, name, context = self._reader.fields("Frame", position)
            texts = [
                self._reader.string(text, f"Frame.{field}") if text else ""
                for text, field in ((filename, "filename"), (name, "name"), (context, "context"))
            ]
            self._reader.spend(OBJECT_COST, "Frame", position)
            found = self._frames[position] = schema.Frame(texts[0], lineno, *texts[1:])
        return found
