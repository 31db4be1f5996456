"""What is written is what is read, and what cannot be said is refused."""

from __future__ import annotations

import math

import pytest
import torch

from lowerdeck.demo_backends import BlobError
from lowerdeck.demo_backends.text_format import Step, TextProgram, Value, kind_of, read, write
from lowerdeck.torch_base import bytes_of

DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool),
)


def round_trip(program: TextProgram) -> tuple[TextProgram, dict[str, memoryview]]:
    kept: dict[str, memoryview] = {}

    def store(key: str, tensor: torch.Tensor) -> None:
        kept[key] = memoryview(bytes_of(tensor)).cast("B")

    blob = write("Name", "7", program, store)
    return read("Name", "7", blob, {"op"}, kept), kept


def test_every_operand_is_read_as_it_was_written() -> None:
    weights = [torch.arange(6).reshape(3, 2).to(dtype) for dtype in DTYPES]
    scalar, empty = torch.tensor(2.5), torch.zeros(0, 3)
    numbers = [0, -3, 2**63 - 1, -(2**63), 0.5, -1e-30, 1e300, 5e-324, math.inf, -math.inf]
    lists = [[], [1], [2, -1], [2**63 - 1]]
    operands = [Value(0), None, *numbers, *lists, *weights, scalar, empty]
    program = TextProgram(
        ["float32", "number", scalar], [Step("op", 0, operands), Step("op", "a/b", [])], [Value(4)]
    )
    found, kept = round_trip(program)
    assert len(kept) == len(DTYPES) + 2 - 1  # uint8 and int8 have the same bytes
    assert found.inputs[:2] == ["float32", "number"]
    assert torch.equal(found.inputs[2], scalar)  # type: ignore[arg-type]
    assert [(step.op, step.identifier) for step in found.steps] == [("op", 0), ("op", "a/b")]
    assert found.outputs == [Value(4)]
    assert isinstance(found.steps[0].operands[0], Value)
    for one, other in zip(found.steps[0].operands, operands, strict=True):
        assert type(one) is type(other)
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(one, other)
            assert kind_of(one) == kind_of(other)
        else:
            assert one == other


@pytest.mark.parametrize(
    "operand", ["text", True, object(), [0.5], torch.ones(1, dtype=torch.cfloat)]
)
def test_what_has_no_word_is_refused(operand: object) -> None:
    program = TextProgram([], [Step("op", 0, [operand])], [Value(0)])  # type: ignore[list-item]
    with pytest.raises(BlobError):
        round_trip(program)
