"""After writes through ``view(dtype)`` ours and torch's differ in nodes that copy nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from program_likeness import differences  # type: ignore[import-not-found]
from torch import nn
from torch.export import ExportedProgram

from lowerdeck.decompose import decompose

_NOTHING = (torch.ops.aten.alias.default, torch.ops.aten.detach.default)


def _mask(x: torch.Tensor, mask: torch.Tensor) -> Any:
    bits = mask.view(torch.uint8)
    bits |= 1
    return mask.logical_not_(), bits.sum()


def _row(x: torch.Tensor, mask: torch.Tensor) -> Any:
    mask[0] &= x[0] > 0
    bits = mask[1].view(torch.uint8)
    bits |= 1
    return bits, mask


def _back_and_forth(x: torch.Tensor, mask: torch.Tensor) -> Any:
    made = x > 0
    again = made.view(torch.uint8).view(torch.bool)
    again &= mask
    return made, again


def _sign(x: torch.Tensor, mask: torch.Tensor) -> Any:
    bits = x.view(torch.int32)
    bits.bitwise_and_(0x7FFFFFFF)
    return x, bits, bits < 0


def _base(x: torch.Tensor, mask: torch.Tensor) -> Any:
    bits = mask[1].view(torch.uint8)
    mask.logical_not_()
    return bits


class _Calls(nn.Module):
    def __init__(self, called: Callable[..., Any]) -> None:
        super().__init__()
        self.called = called

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> Any:
        return self.called(x, mask)


def _without(program: ExportedProgram) -> ExportedProgram:
    """Return a program without the nodes that copy nothing."""
    made = copy.deepcopy(program)
    for node in list(made.graph.nodes):
        if node.target in _NOTHING:
            node.replace_all_uses_with(node.args[0])
            made.graph.erase_node(node)
    return made


def _inputs() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.arange(16.0).view(4, 4) - 8
    return x, x % 3 == 0


@pytest.mark.parametrize("called", [_mask, _row, _back_and_forth, _sign, _base])
def test_all_else_is_as_torch_gives_it(called: Callable[..., Any]) -> None:
    model = _Calls(called)
    program = torch.export.export(model, _inputs())
    found = decompose(program)
    assert not differences(_without(found), _without(program.run_decompositions()))
    given, own = _inputs(), _inputs()
    torch.testing.assert_close(found.module()(*own), model(*given))
    torch.testing.assert_close(own, given)
