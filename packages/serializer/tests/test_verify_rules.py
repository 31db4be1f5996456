"""Rules of verify that damaged files seldom meet: each with a file that breaks this rule alone."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import pytest

from lowerdeck.serializer import (
    Bool,
    ContentError,
    Double,
    FormatError,
    Int,
    IntList,
    JumpFalseCall,
    Null,
    String,
    Tensor,
    TensorList,
    serialize_pte,
    verify_pte,
)
from lowerdeck_files.programs import add_program, program, tensor

# The places of fields in a table of a method, as the schema orders them.
LISTS = {"values": 2, "inputs": 3, "outputs": 4, "chains": 5, "delegates": 7}
LISTS["non_const_buffer_sizes"] = 8


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
    reason = rf"method 'forward'\.{name} at byte .* found none"
    with pytest.raises(FormatError, match=reason) as caught:
        verify_pte(file)
    assert caught.value.offset


THREE = tuple(tensor(at=64 * place) for place in range(3))
COPY, ADD, SIZE = "aten::copy_", "executorch_prim::add.Scalar", "aten::sym_size.int"


@pytest.mark.parametrize(
    ("name", "values", "args", "reason"),
    [
        (COPY, [*THREE, Bool(False)], [0, 1, 3, 0], None),
        (
            COPY,
            [*THREE, Bool(False)],
            [0, 1, 3, 2],
            r"found value 2 for the result of .*, expected 0, which it updates",
        ),
        (ADD, [*THREE, Int(1), Int(0)], [3, 3, 4], None),
        (ADD, [*THREE, Int(1), Int(0)], [0, 3, 4], r"Tensor \(value 0\) as argument 0"),
        (ADD, [*THREE, Int(1), Int(0)], [3, 0, 4], r"Tensor \(value 0\) as argument 1"),
        # The runtime trusts a dimension, and aborts the process on an invalid one.
        (SIZE, [*THREE, Int(0), Int(0)], [0, 3, 4], None),
        (SIZE, [*THREE, Int(0), Int(0)], [0, 3, 3], "a computed dimension in argument 1"),
        (SIZE, [*THREE, Int(0), Int(0)], [0, 4, 4], "a computed dimension in argument 1"),
        ("aten::bmm.out", [*THREE], [0, 1, 2, 2], r"otherwise aten::bmm\.out aborts the process"),
        *(
            (COPY, [tensor(at=start, memory=memory), Bool(False)], [0, 0, 1, 0], reason)
            for memory, start, reason in (
                (1, 1016, None),
                (1, 66, "at 66, expected a multiple of 4, the size of an element"),
                (0, 64, "found memory_id 0, expected 1 to 1"),
                (2, 64, "found memory_id 2, expected 1 to 1"),
                (1, 1020, "found planned memory up to byte 1028 of memory 1, which has 1024"),
            )
        ),
    ],
)
def test_a_call_keeps_the_rules_of_its_kernel_and_memory(
    name: str, values: Sequence[Any], args: Sequence[int], reason: str | None
) -> None:
    file = serialize_pte(program(values, (name, args), inputs=[0]))
    if reason is None:
        verify_pte(file)
        return
    with pytest.raises(FormatError, match=reason):
        verify_pte(file)


@pytest.mark.parametrize(("value", "told"), [(1, "constants"), (0, "initial values")])
def test_data_that_is_not_there_is_told_by_what_it_is(value: int, told: str) -> None:
    made = add_program()
    tensor = made.execution_plan[0].values[value].val
    assert isinstance(tensor, Tensor)
    tensor.data_buffer_idx = 9
    with pytest.raises(FormatError, match=f"found data_buffer_idx 9.* the number of {told}"):
        verify_pte(serialize_pte(made))


# Memory that a view gives: only where no way leads past the view, and never a constant's.
_INPUT, _VIEW, _OTHER, _SIZES, _FLAG, _OUT, _LIST, _CONSTANT, _WIDE = range(9)
_NAMES = ("executorch_prim::et_view.default", "mine::use.out", "aten::relu.out")


def _view(source: int, out: int) -> Any:
    return _NAMES[0], [source, _SIZES, out, out]


def _use(value: int) -> Any:
    return _NAMES[1], [value, _OUT, _OUT]


def _away(step: int) -> JumpFalseCall:
    return JumpFalseCall(_FLAG, step)


def _file(*chains: Sequence[Any]) -> bytes:
    values = [tensor((4,)), tensor((4,)), tensor((4,)), IntList([]), Bool(True), tensor((4,))]
    values += [TensorList([_INPUT, _VIEW]), tensor((4,), index=1), tensor((8,))]
    # Calls of each kernel, which number them alike in every chain.
    first: list[Any] = [(name, []) for name in _NAMES]
    made = [
        program(values, *first, *steps, constants=[bytes(16)], inputs=[0], outputs=[_OUT])
        for steps in chains
    ]
    plan = made[0].execution_plan[0]
    plan.chains = [one.execution_plan[0].chains[0] for one in made]
    for chain in plan.chains:
        del chain.instructions[: len(first)]
    return bytes(serialize_pte(made[0]))


_IN_VIEW, _FROM_OTHER = _view(_INPUT, _VIEW), _view(_VIEW, _OTHER)
_CONSTANTS = _view(_CONSTANT, _VIEW), _view(_VIEW, _OTHER)
_PAIR = _IN_VIEW, _use(_VIEW)
VIEWS: dict[str, tuple[Sequence[Sequence[Any]], str | None]] = {
    "used": ([_PAIR], None),
    "of views": ([(_IN_VIEW, _FROM_OTHER, _use(_OTHER), _use(_LIST), _use(_LIST))], None),
    "in a branch": ([(_away(3), *_PAIR, _use(_INPUT))], None),
    "in a loop": ([(*_PAIR, _away(0))], None),
    "among jumps": ([(_away(1), _IN_VIEW, _away(4), _use(_VIEW), _use(_VIEW))], None),
    "on both ways": ([(_away(3), *_PAIR, *_PAIR)], None),
    "in both chains": ([_PAIR, _PAIR], None),
    "of a constant": ([(*_CONSTANTS, _use(_OTHER))], None),
    "before": ([(_use(_VIEW), _IN_VIEW)], "without memory"),
    "list before": ([(_use(_LIST), _IN_VIEW)], "without memory"),
    "of none": ([(_view(_OTHER, _VIEW), _use(_VIEW))], "without memory"),
    "jumped past": ([(_away(2), *_PAIR)], "without memory"),
    "list jumped past": ([(_away(3), _IN_VIEW, _use(_LIST), _use(_LIST))], "without memory"),
    "past and back": ([(_away(4), *_PAIR, _use(_VIEW), _away(2))], "without memory"),
    "of other bytes": ([(_view(_INPUT, _WIDE), _use(_WIDE))], "found a view of"),
    "not in the next chain": ([_PAIR, _PAIR[1:]], "without memory"),
    "later in the next chain": ([_PAIR, _PAIR[::-1]], "without memory"),
    "constant written": (
        [(*_CONSTANTS, (_NAMES[2], [_INPUT, _OTHER, _OTHER]))],
        f"found the constant {_OTHER} where aten::relu",
    ),
    "constant as a view": (
        [[_view(_INPUT, _CONSTANT)]],
        f"found the constant {_CONSTANT} as the o",
    ),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_gives_memory_where_it_is_made(name: str) -> None:
    chains, reason = VIEWS[name]
    if reason is None:
        verify_pte(_file(*chains))
        return
    with pytest.raises(ContentError, match=reason):
        verify_pte(_file(*chains))


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("gt.Scalar", Bool(False), Int(0)),
        ("eq.Scalar", Bool(False), IntList([])),
        ("lt.Scalar", Bool(False), tensor((2,), at=64).val),
        ("truediv.Scalar", Double(0.0), Bool(False)),
        ("mod.int", Int(0), Double(0.0)),
        ("add.Scalar", Int(0), Null()),
        ("mul.Scalar", Double(0.0), String("a")),
    ],
)
def test_a_number_is_not_written_over_another_kind(name: str, right: Any, wrong: Any) -> None:
    """The next call would read it: kernels end the process on a value of another kind."""
    call = (f"executorch_prim::{name}", range(3))
    verify_pte(serialize_pte(program([Int(4), Int(3), right], call)))
    with pytest.raises(ContentError, match="writes its result, expected"):
        verify_pte(serialize_pte(program([Int(4), Int(3), wrong], call)))
