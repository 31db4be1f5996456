"""The table of kernel arguments says what torch's own schemas say."""

from __future__ import annotations

import pytest
import torch

from lowerdeck.serializer import runtime_kernels

_LETTERS = {
    "Tensor": "T",
    "Optional[Tensor]": "t",
    "List[Tensor]": "L",
    "List[Optional[Tensor]]": "O",
    "int": "i",
    "Optional[int]": "j",
    "List[int]": "I",
    "Optional[List[int]]": "J",
    "number": "n",
    "Optional[number]": "m",
    "float": "f",
    "Optional[float]": "g",
    "Optional[List[float]]": "F",
    "bool": "b",
    "Optional[bool]": "c",
    "List[bool]": "B",
    "str": "s",
    "Optional[str]": "r",
}
_WRITTEN = {"T": "W", "L": "V"}
NAMES = [name for name in runtime_kernels() if name.startswith("aten::")]


@pytest.mark.parametrize("name", NAMES)
def test_signature(name: str) -> None:
    operator, _, overload = name.removeprefix("aten::").partition(".")
    schemas = torch._C._jit_get_schemas_for_operator(f"aten::{operator}")
    (schema,) = (each for each in schemas if each.overload_name == overload)
    letters = ""
    for argument in schema.arguments:
        letter = _LETTERS[str(argument.type)]
        written = argument.alias_info is not None and argument.alias_info.is_write
        letters += _WRITTEN[letter] if written else letter
    returned = str(schema.returns[0].type) if schema.returns else ""
    scalar = "n" if returned in {"int", "float", "bool", "number"} else ""
    kernel = runtime_kernels()[name]
    assert (kernel.arguments, kernel.returned) == (letters, scalar)
