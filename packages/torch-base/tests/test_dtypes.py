"""The numbers of dtypes and memory formats, beside those that torch's own C++ has."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch

from lowerdeck.torch_base import DTYPES, MEMORY_FORMATS, SCALAR_TYPES, is_channels_last

_EVERY = {one for one in vars(torch).values() if isinstance(one, torch.dtype)}
# TorchScript has no enumerations: a dtype is its number there, and so is a memory format.
_SCRIPTS = """
def number(x: Tensor):
    return x.dtype

def formats():
    return [
        torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d
    ]
"""


@pytest.fixture(scope="module")
def torchs() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.CompilationUnit(_SCRIPTS)


@pytest.mark.parametrize("dtype", sorted(_EVERY, key=str), ids=str)
def test_a_dtype_has_torchs_number_or_none(torchs: Any, dtype: torch.dtype) -> None:
    with warnings.catch_warnings():
        # Complex halves are experimental, quantized tensors deprecated.
        warnings.simplefilter("ignore", UserWarning)
        if dtype in {torch.quint8, torch.qint8, torch.qint32}:
            tensor = torch._empty_affine_quantized([1], scale=1.0, zero_point=0, dtype=dtype)
        else:
            tensor = torch.empty(1, dtype=dtype)
    number = torchs.number(tensor)
    assert DTYPES.get(number, dtype) == dtype
    assert SCALAR_TYPES.get(dtype, number) == number
    assert (dtype in SCALAR_TYPES) == (number in DTYPES)


def test_all_are_there_that_a_program_can_hold() -> None:
    # Elements that share bytes or need a scale.
    shared = r"u?int[1-7]|quint\w+|qint\w+|bits\w+|float4\w+"
    # Younger than the format's last number, 29; the last is of torch 2.15.
    left_out = re.compile(rf"torch\.({shared}|float8_e8m0fnu|bcomplex32)")
    assert {one for one in _EVERY if not left_out.fullmatch(str(one))} == set(SCALAR_TYPES)


def test_memory_formats_have_torchs_numbers(torchs: Any) -> None:
    assert torchs.formats() == list(MEMORY_FORMATS)
    assert list(MEMORY_FORMATS.values()) == [
        torch.contiguous_format,
        torch.preserve_format,
        torch.channels_last,
        torch.channels_last_3d,
    ]


@pytest.mark.parametrize(
    ("sizes", "form", "lies_so"),
    [
        ((2, 3, 4, 5), torch.channels_last, True),
        ((2, 3, 4, 5, 6), torch.channels_last_3d, True),
        ((2, 3, 4, 5), torch.contiguous_format, False),
        # One channel, or one pixel: both, and so plain.
        ((2, 1, 4, 5), torch.channels_last, False),
        ((2, 3, 1, 1), torch.channels_last, False),
    ],
)
def test_channels_lie_last_only_where_nothing_else_fits(
    sizes: tuple[int, ...], form: torch.memory_format, lies_so: bool
) -> None:
    tensor = torch.ones(sizes).contiguous(memory_format=form)
    assert is_channels_last(tensor) is lies_so
    assert not is_channels_last(tensor[0, 0])


def test_sizes_that_are_read_from_data_lie_plain() -> None:
    class Narrowed(torch.nn.Module):
        def forward(self, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
            size: Any = count.item()
            torch._check(size >= 2)  # type: ignore[no-untyped-call]
            torch._check(size <= 5)  # type: ignore[no-untyped-call]
            return x.narrow(3, 0, size)

    program = torch.export.export(Narrowed(), (torch.ones(2, 3, 4, 5), torch.tensor(3)))
    (narrow,) = program.graph.find_nodes(op="call_function", target=torch.ops.aten.narrow.default)
    assert is_channels_last(narrow.meta["val"]) is False


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_layouts_of_dynamic_sizes_ask_torch_nothing(
    form: torch.memory_format, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = torch.ones(2, 3, 8, 8).contiguous(memory_format=form)
    dims = dict.fromkeys((0, 2, 3), torch.export.Dim.AUTO)
    program = torch.export.export(torch.nn.ReLU(), (images,), dynamic_shapes=(dims,))
    environment = torch.fx.experimental.symbolic_shapes.ShapeEnv
    monkeypatch.delattr(environment, "evaluate_expr")
    for node in program.graph.find_nodes(op="placeholder"):
        assert is_channels_last(node.meta["val"]) is (form is torch.channels_last)
