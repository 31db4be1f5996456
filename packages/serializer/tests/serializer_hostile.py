"""Files that are wrong: real ones damaged in every way, and well-formed ones with bad content."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from typing import Any

from lowerdeck import serializer as pte

_WORDS = (0, 1, 4, 23, 64, 0x10000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFF0, 0xFFFFFFFF)
_STEPS = (-4, -1, 1, 2, 4, 8)


def damaged(data: bytes, seed: int, count: int) -> Iterator[tuple[str, bytes]]:
    """Yield ``count`` damaged copies of a file, each with what was done to it.

    Args:
        seed: Makes the random ones repeatable.
        count: How many: a tenth are cut, a quarter have another word in the first 64 bytes.
    """
    chance = random.Random(seed)
    size = struct.unpack_from("<Q", data, 16)[0] if data[8:12] == b"eh00" else len(data)
    for number in range(count):
        if number % 10 == 0:
            end = chance.choice((0, 4, 8, 12, 39, 63, chance.randrange(len(data)), len(data) - 1))
            yield f"cut to {end}", data[:end]
            continue
        damage = bytearray(data)
        at = chance.randrange(min(size, 64) if number % 4 == 1 else size)
        if number % 3 == 0:
            damage[at] ^= 1 << chance.randrange(8)
            yield f"bit of byte {at}", bytes(damage)
            continue
        at &= ~3
        (word,) = struct.unpack_from("<I", damage.ljust(at + 4, b"\0"), at)
        word = chance.choice(_WORDS) if number % 3 == 1 else (word + chance.choice(_STEPS)) % 2**32
        damage[at : at + 4] = word.to_bytes(4, "little")[: len(data) - at]
        yield f"word {at} = {word:#x}", bytes(damage)


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
    "jump past the end": lambda program, plan: plan.chains.append(
        pte.Chain(instructions=[pte.Instruction(pte.JumpFalseCall(_bool(plan), 7))])
    ),
}


def _bool(plan: pte.ExecutionPlan) -> int:
    """Return the index of a boolean value, adding one."""
    plan.values.append(pte.EValue(pte.Bool(False)))
    return len(plan.values) - 1
