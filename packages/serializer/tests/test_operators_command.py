"""``lowerdeck ops`` lists what a file calls, and with which tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lowerdeck.script import main
from lowerdeck.serializer import (
    Chain,
    EValue,
    ExecutionPlan,
    Instruction,
    Int,
    KernelCall,
    Operator,
    OptionalTensorList,
    Program,
    ScalarType,
    Tensor,
    TensorList,
    serialize_pte,
)
from lowerdeck.serializer.commands.operators import operator_kernels, selective_build_lines


def tensor(kind: ScalarType, *sizes: int) -> EValue:
    return EValue(Tensor(kind, sizes=list(sizes), dim_order=list(range(len(sizes)))))


def program(*calls: list[int], odd: str = "aten::odd") -> Program:
    """A program of one operator that is called, and one that never is."""
    values = [
        tensor(ScalarType.FLOAT, 2, 2),
        tensor(ScalarType.LONG, 3),
        EValue(Int(7)),
        EValue(TensorList([1, 0])),
        EValue(OptionalTensorList([-1, 0])),
        EValue(OptionalTensorList([-1])),
        tensor(ScalarType.DOUBLE),
    ]
    plan = ExecutionPlan(
        "forward",
        values=values,
        operators=[Operator("aten::cat", "out"), Operator(odd)],
        chains=[Chain(instructions=[Instruction(KernelCall(0, each)) for each in calls])],
    )
    return Program(execution_plan=[plan])


def test_each_way_of_calling_is_told_once() -> None:
    found = operator_kernels(program([3, 2, 0], [3, 2, 0], [4, 0], [5, 6], [2]))
    keys = ["v1", "v1/4;0|6;0,1", "v1/6;0,1|6;0,1", "v1/7;"]
    assert found == {"aten::cat.out": keys, "aten::odd": []}


def test_names_of_a_file_are_texts_and_nothing_else() -> None:
    name = 'a: "b"\n- c'
    lines = list(selective_build_lines(operator_kernels(program(odd=name)), "x\n.pte"))
    assert lines.count(f"  {json.dumps(name)}:") == 1
    assert f"    - {json.dumps('x' + chr(10) + '.pte')}" in lines
    assert not any("\n" in line for line in lines)


def test_the_command_prints_names_and_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "empty.pte"
    path.write_bytes(
        serialize_pte(Program(execution_plan=[ExecutionPlan("forward", chains=[Chain()])]))
    )
    assert main(["ops", str(path), "--yaml"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "operators: {}" in shown
    assert "et_kernel_metadata: {}" in shown
    path.write_bytes(b"nothing of the kind")
    assert main(["ops", str(path)]) == 3
    assert "empty.pte" in capsys.readouterr().err
