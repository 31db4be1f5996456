"""Files that are wrong: real ones damaged in every way, and well-formed ones with bad content."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from typing import Any

from lowerdeck import serializer as pte

_WORDS = (0, 1, 4, 0x7F, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFFFFF0, 0x10000)
_LONGS = (0, 1, 23, 40, 64, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 128, 2**64 - 1)


def damaged(data: bytes, seed: int, count: int) -> Iterator[tuple[str, bytes]]:
    """Yield ``count`` damaged copies of a file, each with what was done to it.

    Args:
        data: A good file.
        seed: Makes the random ones repeatable.
        count: How many; below about 120 not every kind of header damage comes up.
    """
    chance = random.Random(seed)
    made = [*_cut(data, chance), *_headers(data)]
    chance.shuffle(made)
    yield from made[: count // 3]
    size = _program_size(data)
    for number in range(count - len(made[: count // 3])):
        damage = bytearray(data)
        position = chance.randrange(size)
        if number % 3 == 0:
            damage[position] ^= 1 << chance.randrange(8)
            yield f"bit of byte {position}", bytes(damage)
        elif number % 3 == 1:
            position &= ~3
            word = chance.choice(_WORDS)
            damage[position : position + 4] = word.to_bytes(4, "little")
            yield f"word {position} = {word:#x}", bytes(damage)
        else:
            position &= ~3
            (word,) = struct.unpack_from("<I", damage.ljust(position + 4, b"\0"), position)
            word = (word + chance.choice((-4, -1, 1, 2, 4, 8))) & 0xFFFFFFFF
            damage[position : position + 4] = word.to_bytes(4, "little")
            yield f"word {position} moved to {word:#x}", bytes(damage)


def _cut(data: bytes, chance: random.Random) -> Iterator[tuple[str, bytes]]:
    for size in (0, 1, 4, 7, 8, 11, 12, 31, 32, 39, 40, 63, 64, len(data) - 1):
        yield f"cut to {size}", data[:size]
    for _ in range(12):
        size = chance.randrange(len(data))
        yield f"cut to {size}", data[:size]


def _headers(data: bytes) -> Iterator[tuple[str, bytes]]:
    for magic in (b"ET11", b"FT01", b"\0\0\0\0", b"et12"):
        yield f"magic {magic!r}", data[:4] + magic + data[8:]
    for root in (0, 4, 7, 9, len(data) - 3, len(data), 0x7FFFFFFF, 0xFFFFFFFF):
        yield f"root {root}", root.to_bytes(4, "little") + data[4:]
    if data[8:12] != b"eh00":
        return
    yield "no header magic", data[:8] + b"EH00" + data[12:]
    for length in (0, 8, 23, 24, 31, 33, 40, 2**31, 2**32 - 1):
        yield f"header length {length}", data[:12] + struct.pack("<I", length) + data[16:]
    for position, field in ((16, "program size"), (24, "base"), (32, "data size")):
        (now,) = struct.unpack_from("<Q", data, position)
        for value in {*_LONGS, now + 1, now - 1, now + 128, len(data), len(data) + 1}:
            raw = struct.pack("<Q", value % 2**64)
            yield f"header {field} {value}", data[:position] + raw + data[position + 8 :]


def _program_size(data: bytes) -> int:
    if data[8:12] == b"eh00":
        size: int = struct.unpack_from("<Q", data, 16)[0]
        return size
    return len(data)


def bad_contents(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield well-formed files with one content each that is wrong.

    Args:
        data: A good file; what it has decides which contents can be wrong.
    """
    for method in range(len(pte.deserialize_pte(data).execution_plan)):
        for name, spoil in _SPOILERS.items():
            program = pte.deserialize_pte(data)
            try:
                spoil(program, program.execution_plan[method])
            except (LookupError, StopIteration):
                # This file has nothing that could be wrong in this way.
                continue
            yield f"{name} in method {method}", pte.serialize_pte(program)


def _tensor(field: str, value: object) -> Callable[[pte.Program, pte.ExecutionPlan], None]:
    def spoil(program: pte.Program, plan: pte.ExecutionPlan) -> None:
        # Whatever else says where external data are is ignored by everybody.
        tensors = (value.val for value in plan.values if isinstance(value.val, pte.Tensor))
        setattr(next(tensor for tensor in tensors if not tensor.extra_tensor_info), field, value)

    return spoil


def _method(field: str, value: object) -> Callable[[pte.Program, pte.ExecutionPlan], None]:
    return lambda program, plan: setattr(plan, field, value)


def _append(field: str, value: object) -> Callable[[pte.Program, pte.ExecutionPlan], None]:
    return lambda program, plan: getattr(plan, field).append(value)


def _value(
    make: Callable[[pte.ExecutionPlan], Any],
) -> Callable[[pte.Program, pte.ExecutionPlan], None]:
    return lambda program, plan: plan.values.append(pte.EValue(make(plan)))


def _step(
    make: Callable[[pte.ExecutionPlan], Any],
) -> Callable[[pte.Program, pte.ExecutionPlan], None]:
    def spoil(program: pte.Program, plan: pte.ExecutionPlan) -> None:
        plan.chains[0].instructions.append(pte.Instruction(make(plan)))

    return spoil


def _kernel(change: Callable[[pte.KernelCall, pte.ExecutionPlan], object]) -> Callable[..., None]:
    def spoil(program: pte.Program, plan: pte.ExecutionPlan) -> None:
        calls = [step.instr_args for step in plan.chains[0].instructions]
        change(next(call for call in calls if isinstance(call, pte.KernelCall)), plan)

    return spoil


def _retype(call: pte.KernelCall, plan: pte.ExecutionPlan) -> None:
    plan.values.append(pte.EValue(pte.String("no tensor")))
    call.args[0] = len(plan.values) - 1


def _unplan(call: pte.KernelCall, plan: pte.ExecutionPlan) -> None:
    """Take the memory from a tensor that is neither input nor output."""
    given = {*plan.inputs, *plan.outputs}
    index = next(
        index
        for index in call.args
        if isinstance(tensor := plan.values[index].val, pte.Tensor)
        and tensor.allocation_info
        and index not in given
    )
    plan.values[index].val.allocation_info = None  # type: ignore[union-attr]


def _write_constant(call: pte.KernelCall, plan: pte.ExecutionPlan) -> None:
    constant = next(
        index
        for index, value in enumerate(plan.values)
        if isinstance(value.val, pte.Tensor)
        and value.val.data_buffer_idx
        and not value.val.allocation_info
    )
    call.args[-2:] = [constant, constant]


def _first_tensor(plan: pte.ExecutionPlan) -> int:
    return next(i for i, value in enumerate(plan.values) if isinstance(value.val, pte.Tensor))


def _swap_lists(program: pte.Program, plan: pte.ExecutionPlan) -> None:
    """Move a list before the tensors that it lists, everything else following."""
    plan.values.insert(0, pte.EValue(pte.TensorList([_first_tensor(plan) + 1])))


_EXTERNAL = pte.ExtraTensorInfo(location=pte.TensorDataLocation.EXTERNAL)
_SPOILERS: dict[str, Callable[[pte.Program, pte.ExecutionPlan], object]] = {
    "storage offset": _tensor("storage_offset", 1),
    "negative storage offset": _tensor("storage_offset", -1),
    "negative size": _tensor("sizes", [-1]),
    "too many elements": _tensor("sizes", [2**31 - 1] * 3),
    "dim order too long": _tensor("dim_order", [0] * 5),
    "dim order out of range": _tensor("dim_order", [255]),
    "no such data": _tensor("data_buffer_idx", 99),
    "wild data index": _tensor("data_buffer_idx", 2**32 - 1),
    "memory 0": _tensor("allocation_info", pte.AllocationDetails(0, 0)),
    "no such memory": _tensor("allocation_info", pte.AllocationDetails(9, 0)),
    "memory offset": _tensor("allocation_info", pte.AllocationDetails(1, 2**32 - 1)),
    "high memory offset": _tensor("allocation_info", pte.AllocationDetails(1, 0, 2**32 - 1)),
    "unbound": _tensor("shape_dynamism", pte.TensorShapeDynamism.DYNAMIC_UNBOUND),
    "external without name": _tensor("extra_tensor_info", _EXTERNAL),
    "input -1": _method("inputs", [-1]),
    "wild input": _method("inputs", [10_000]),
    "output -2": _method("outputs", [-2]),
    "wild output": _method("outputs", [10_000]),
    "no chain": _method("chains", []),
    "no memory": _method("non_const_buffer_sizes", []),
    "memory 0 used": _method("non_const_buffer_sizes", [5]),
    "negative memory": _method("non_const_buffer_sizes", [0, -1]),
    "endless memory": _method("non_const_buffer_sizes", [0, 2**62]),
    "wild memory": _method("non_const_buffer_sizes", [0, 2**34]),
    "wild device": _method("non_const_buffer_device", [pte.NonConstBufferDevice(77)]),
    "operator name of 100": _append("operators", pte.Operator("aten::" + "x" * 94)),
    "operator names of 100": _append("operators", pte.Operator("a" * 50, "b" * 49)),
    "operator without name": _append("operators", pte.Operator("")),
    "operator with NUL": _append("operators", pte.Operator("aten::a\0b")),
    "no such operator": _step(lambda plan: pte.KernelCall(9999, [0])),
    "operator -1": _step(lambda plan: pte.KernelCall(-1, [0])),
    "no such argument": _step(lambda plan: pte.KernelCall(0, [len(plan.values)])),
    "argument -1": _step(lambda plan: pte.KernelCall(0, [-1])),
    "no such delegate": _step(lambda plan: pte.DelegateCall(9999, [0])),
    "delegate -1": _step(lambda plan: pte.DelegateCall(-1, [0])),
    "move from -1": _step(lambda plan: pte.MoveCall(-1, 0)),
    "move to nowhere": _step(lambda plan: pte.MoveCall(0, len(plan.values))),
    "no condition": _step(lambda plan: pte.JumpFalseCall(len(plan.values), 0)),
    "jump -1": _step(lambda plan: pte.JumpFalseCall(_first_tensor(plan), -1)),
    "condition of floats": _step(lambda plan: pte.JumpFalseCall(_first_tensor(plan), 0)),
    "free -1": _step(lambda plan: pte.FreeCall(-1)),
    "free nothing": _step(lambda plan: pte.FreeCall(len(plan.values))),
    "free an output": _step(lambda plan: pte.FreeCall(plan.outputs[0])),
    "argument too many": _kernel(lambda call, plan: call.args.append(0)),
    "argument too few": _kernel(lambda call, plan: call.args.pop()),
    "argument of another kind": _kernel(_retype),
    "argument without memory": _kernel(_unplan),
    "constant written": _kernel(_write_constant),
    "list of nothing": _value(lambda plan: pte.TensorList([len(plan.values) + 9])),
    "list of -1": _value(lambda plan: pte.TensorList([-1])),
    "list of itself": _value(lambda plan: pte.TensorList([len(plan.values)])),
    "optional list of -2": _value(lambda plan: pte.OptionalTensorList([-2])),
    "optional list of itself": _value(lambda plan: pte.OptionalTensorList([len(plan.values)])),
    "int list of -1": _value(lambda plan: pte.IntList([-1])),
    "int list of a wild index": _value(lambda plan: pte.IntList([2**40])),
    "int list of a tensor": _value(lambda plan: pte.IntList([_first_tensor(plan)])),
    "list before its tensors": _swap_lists,
    "version": lambda program, plan: setattr(program, "version", 1),
    "method twice": lambda program, plan: program.execution_plan.append(plan),
    "jump past the end": lambda program, plan: plan.chains.append(
        pte.Chain(instructions=[pte.Instruction(pte.JumpFalseCall(_bool(plan), 7))])
    ),
}


def _bool(plan: pte.ExecutionPlan) -> int:
    """Return the index of a boolean value, adding one."""
    plan.values.append(pte.EValue(pte.Bool(False)))
    return len(plan.values) - 1
