"""Constants that were exchanged after the export, against what eager makes of the program."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram

from lowerdeck.torch_base import changed_constant


class Scaled(nn.Module):
    """A layer whose result is scaled by a buffer and by a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("scale", torch.ones(3))
        self.offset = torch.ones(3)

    def forward(self, x: torch.Tensor) -> Any:
        """Return three numbers for each row."""
        return self.layer(x) * self.scale + self.offset


def exported() -> ExportedProgram:
    return torch.export.export(Scaled(), (torch.ones(2, 4),))


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("layer.weight", torch.ones(3, 5), r"found \[3, 5\] of torch.float32 for 'layer.weight'"),
        ("layer.bias", torch.ones(2), r"found \[2\] .* which aten.linear.default .* reads"),
        (
            "scale",
            torch.ones(3, dtype=torch.float64),
            r"float64 for 'scale', which aten.mul",
        ),
        ("offset", torch.ones(3, 1), r"\[3, 1\] .* expected \[3\] of torch.float32, as exported"),
    ],
)
def test_what_no_longer_fits_is_told_with_its_reader(
    name: str, tensor: torch.Tensor, message: str
) -> None:
    program = exported()
    assert changed_constant(program) is None
    held = program.constants if name == "offset" else program.state_dict
    held[name] = tensor
    found = changed_constant(program)
    assert found is not None
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(found)


def test_other_numbers_of_the_same_kind_are_nobodys_affair() -> None:
    program = exported()
    program.state_dict["layer.weight"] = torch.zeros(4, 3).t()  # other strides, too
    assert changed_constant(program) is None
    twice = torch.export.export(
        Scaled(), (torch.ones(2, 4),), dynamic_shapes=({0: torch.export.Dim("rows")},)
    ).run_decompositions()
    assert changed_constant(twice) is None
