"""Rules of verify that damaged files seldom meet: each with a file that breaks this rule alone."""

from __future__ import annotations

import struct

import pytest
from serializer_programs import add_program  # type: ignore[import-not-found]

from lowerdeck.serializer import (
    AllocationDetails,
    Bool,
    Chain,
    EValue,
    ExecutionPlan,
    FormatError,
    Instruction,
    Int,
    KernelCall,
    Operator,
    Program,
    ScalarType,
    Tensor,
    serialize_pte,
    verify_pte,
)

# The places of fields in a table of a method, as the schema orders them.
LISTS = {
    "values": 2,
    "inputs": 3,
    "outputs": 4,
    "chains": 5,
    "delegates": 7,
    "non_const_buffer_sizes": 8,
}


def _without(data: bytes, field: int) -> bytes:
    """Return a file whose first method has no such list, not even an empty one."""
    changed = bytearray(data)

    def slot(table: int, number: int) -> int:
        (back,) = struct.unpack_from("<i", changed, table)
        return table - int(back) + 4 + 2 * number

    def follow(table: int, number: int) -> int:
        place = table + int(struct.unpack_from("<H", changed, slot(table, number))[0])
        (on,) = struct.unpack_from("<I", changed, place)
        return place + int(on)

    (root,) = struct.unpack_from("<I", changed, 0)
    methods = follow(root, 1)
    method = methods + 4 + struct.unpack_from("<I", changed, methods + 4)[0]
    struct.pack_into("<H", changed, slot(method, field), 0)
    return bytes(changed)


@pytest.mark.parametrize("name", LISTS)
def test_a_method_without_a_list_is_refused_by_its_name(name: str) -> None:
    file = _without(serialize_pte(add_program()), LISTS[name])
    with pytest.raises(
        FormatError, match=rf"method 'forward'\.{name} at byte .* found none"
    ) as told:
        verify_pte(file)
    assert told.value.offset


def _one_tensor(memory: int, *, floats: int) -> EValue:
    place = AllocationDetails.at(1, memory)
    return EValue(Tensor(ScalarType.FLOAT, sizes=[floats], dim_order=[0], allocation_info=place))


def _call(name: str, values: list[EValue], args: list[int]) -> bytes:
    operator, _, overload = name.partition(".")
    plan = ExecutionPlan(
        "forward",
        values=values,
        inputs=[0],
        outputs=[],
        chains=[Chain(instructions=[Instruction(KernelCall(0, args))])],
        operators=[Operator(operator, overload)],
        non_const_buffer_sizes=[0, 1024],
    )
    return serialize_pte(Program(execution_plan=[plan]))


def test_a_kernel_in_place_returns_what_it_writes() -> None:
    values = [*(_one_tensor(64 * place, floats=2) for place in range(3)), EValue(Bool(False))]
    verify_pte(_call("aten::copy_", values, [0, 1, 3, 0]))
    with pytest.raises(FormatError, match=r"found 2 for the return value of aten::copy_.* on 0"):
        verify_pte(_call("aten::copy_", values, [0, 1, 3, 2]))


def test_an_operator_of_the_runtime_takes_numbers_alone() -> None:
    values = [_one_tensor(64, floats=2), EValue(Int(1)), EValue(Int(0))]
    verify_pte(_call("executorch_prim::add.Scalar", values, [1, 1, 2]))
    for args in ([0, 1, 2], [1, 0, 2]):
        number = args.index(0)
        with pytest.raises(FormatError, match=rf"found a Tensor \(value 0\) as argument {number}"):
            verify_pte(_call("executorch_prim::add.Scalar", values, args))


def test_no_dimension_is_computed() -> None:
    """The runtime trusts it, and ends the process over one that is not there."""
    values = [_one_tensor(64, floats=2), EValue(Int(0)), EValue(Int(0))]
    verify_pte(_call("aten::sym_size.int", values, [0, 1, 2]))
    for args in ([0, 1, 1], [0, 2, 2]):
        with pytest.raises(FormatError, match=r"found a computed dimension in argument 1"):
            verify_pte(_call("aten::sym_size.int", values, args))


def test_a_limit_of_a_kernel_is_kept() -> None:
    flat = [_one_tensor(64 * place, floats=2) for place in range(3)]
    with pytest.raises(FormatError, match=r"for aten::bmm\.out, which ends the process otherwise"):
        verify_pte(_call("aten::bmm.out", flat, [0, 1, 2, 2]))


@pytest.mark.parametrize(
    ("memory", "start", "told"),
    [
        (1, 66, r"found planned memory at 66, expected a multiple of 4, the size of an element"),
        (0, 64, r"found memory_id 0, expected 1 to 1"),
        (2, 64, r"found memory_id 2, expected 1 to 1"),
        (1, 1020, r"found planned memory up to byte 1028 of the 1024 of id 1"),
    ],
)
def test_memory_is_planned_where_there_is_some(memory: int, start: int, told: str) -> None:
    def file(memory: int, start: int) -> bytes:
        place = AllocationDetails.at(memory, start)
        tensor = Tensor(ScalarType.FLOAT, sizes=[2], dim_order=[0], allocation_info=place)
        values = [EValue(tensor), EValue(Bool(False))]
        return _call("aten::copy_", values, [0, 0, 1, 0])

    verify_pte(file(1, 1016))
    with pytest.raises(FormatError, match=told):
        verify_pte(file(memory, start))


@pytest.mark.parametrize(("planned", "told"), [(False, "constants"), (True, "initial values")])
def test_data_that_is_not_there_is_told_by_what_it_is(planned: bool, told: str) -> None:
    program = add_program()
    values = program.execution_plan[0].values
    tensor = values[0 if planned else 1].val
    assert isinstance(tensor, Tensor)
    tensor.data_buffer_idx = 9
    with pytest.raises(FormatError, match=f"found data_buffer_idx 9.* the number of {told}"):
        verify_pte(serialize_pte(program))
