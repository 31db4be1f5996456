"""What writes a program, what runs it and what describes it mean the same dtype by a number."""

from __future__ import annotations

import pytest
import torch

from lowerdeck.emitter import UnsupportedError, emit
from lowerdeck.inspect.report.values import dtype_name
from lowerdeck.runner import ProgramError, load
from lowerdeck.serializer import ScalarType, deserialize_pte, serialize_pte
from lowerdeck.torch_base import DTYPES, SCALAR_TYPES


class _Clone(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone()


def _tensor(dtype: torch.dtype) -> torch.Tensor:
    numbers = torch.arange(4 * dtype.itemsize, dtype=torch.uint8)
    return (numbers % 2 if dtype is torch.bool else numbers).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_what_is_emitted_runs_in_every_dtype(dtype: torch.dtype) -> None:
    given = _tensor(dtype)
    program = emit(torch.export.export(_Clone(), (given,))).to_bytes()
    result = load(program).run("forward", given)
    assert result.dtype == dtype
    assert torch.equal(result.view(torch.uint8), given.view(torch.uint8))


@pytest.mark.parametrize(("number", "dtype"), DTYPES.items(), ids=str)
def test_serializer_which_has_no_torch_calls_each_as_torch_does(
    number: int, dtype: torch.dtype
) -> None:
    assert dtype_name(ScalarType(number)) == str(dtype).removeprefix("torch.")
    assert ScalarType(number).itemsize == dtype.itemsize


@pytest.mark.parametrize(
    "dtype", [torch.bits8, torch.uint4, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2], ids=str
)
def test_other_dtypes_are_refused_with_what_to_do(dtype: torch.dtype) -> None:
    exported = torch.export.export(_Clone(), (torch.empty(2, dtype=dtype),))
    with pytest.raises(UnsupportedError, match=rf"'x' is a tensor of {dtype}.*torch.uint8"):
        emit(exported)


@pytest.mark.parametrize("kind", [one for one in ScalarType if one not in DTYPES])
def test_files_of_others_are_refused_with_what_to_do(kind: ScalarType) -> None:
    exported = torch.export.export(_Clone(), (torch.zeros(2, dtype=torch.uint8),))
    program = deserialize_pte(emit(exported).to_bytes())
    for value in program.execution_plan[0].values:
        if getattr(value.val, "scalar_type", None) == SCALAR_TYPES[torch.uint8]:
            value.val.scalar_type = kind
    with pytest.raises(ProgramError, match=rf"{kind.name}.*torch.uint8"):
        load(serialize_pte(program)).method("forward")
