# ruff: noqa: A002, A006
"""Programs that were copied, or saved and loaded, before anything was done with them.

A copy is not what was copied: fx names its nodes anew, weights move, and users of values are
told again. Every way through our packages must give eager's numbers all the same.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from lowerdeck.decompose import decompose
from lowerdeck.emitter import emit
from lowerdeck.lowered_module import lower, to_backend
from lowerdeck.unflatten import unflatten
from lowerdeck.xnnpack import XnnpackPartitioner
from lowerdeck_zoo import official

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not official.available(), reason=official.REASON),
]


ROWS = Dim("rows", min=2, max=8)


class Builtins(nn.Module):
    """Every input, a buffer and an output are called as something of Python's is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("sum", torch.zeros(4))

    def forward(self, input: Tensor, dict: dict[str, Tensor], max: Tensor) -> Any:
        self.sum.add_(input[0])
        return self.layer(input) @ dict["id"].mT, max * self.sum, max


class Shifted(nn.Module):
    def forward(self, input: Tensor, input_1: Tensor) -> Tensor:
        return (input - input_1).relu()


def _branches() -> tuple[nn.Module, tuple[Any, ...], Any]:
    class Branches(nn.Module):
        def forward(self, input: Tensor, max: Tensor) -> Tensor:
            picked: Tensor = torch.cond(
                input.sum() > 0,
                lambda input, max: input + max,
                lambda input, max: max * 2,
                (input, max),
            )
            return picked

    return Branches(), (torch.ones(3, 4), torch.arange(12.0).view(3, 4)), None


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...], Any]]] = {
    "builtins": lambda: (
        Builtins(),
        (torch.ones(3, 4), {"id": torch.randn(2, 4)}, torch.randn(3, 4)),
        None,
    ),
    "dynamic": lambda: (
        Builtins(),
        (torch.ones(3, 4), {"id": torch.randn(3, 4)}, torch.randn(3, 4)),
        ({0: ROWS}, {"id": {0: ROWS}}, {0: ROWS}),
    ),
    "shifted": lambda: (Shifted(), (torch.ones(3), torch.zeros(3)), None),
    "branches": _branches,
}


def _loaded(program: ExportedProgram) -> ExportedProgram:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


COPIES: dict[str, Callable[[ExportedProgram], ExportedProgram]] = {
    "as it is": lambda program: program,
    "copied": copy.deepcopy,
    "copied twice": lambda program: copy.deepcopy(copy.deepcopy(program)),
    "copied when decomposed": lambda program: copy.deepcopy(decompose(copy.deepcopy(program))),
    "loaded and copied": lambda program: copy.deepcopy(_loaded(program)),
}


WAYS: dict[str, Callable[[ExportedProgram], bytes]] = {
    "emit": lambda program: emit(program).to_bytes(),
    "decompose, emit": lambda program: emit(decompose(program)).to_bytes(),
    "to_backend, emit": lambda program: emit(to_backend(program, XnnpackPartitioner())).to_bytes(),
    "lower": lambda program: lower(program, XnnpackPartitioner()).to_bytes(),
}


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("model", MODELS)
def test_copies_give_eagers_numbers_on_every_way(model: str, copied: str) -> None:
    torch.manual_seed(0)
    module, inputs, shapes = MODELS[model]()
    exported = torch.export.export(module.eval(), inputs, dynamic_shapes=shapes)
    with torch.no_grad():
        wanted = pytree.tree_leaves(copy.deepcopy(module)(*copy.deepcopy(inputs)))
    flat = pytree.tree_leaves(inputs)
    for way, bytes_of in WAYS.items():
        given = COPIES[copied](exported)
        before = [node.name for node in given.graph.nodes]
        outcome = official.run(bytes_of(given), [official.Call(flat)])
        assert [node.name for node in given.graph.nodes] == before, way
        assert isinstance(outcome, official.Ran), f"{way}: {outcome}"
        for found, expected in zip(outcome.outputs[0], wanted, strict=True):
            torch.testing.assert_close(found, expected)
    given = COPIES[copied](exported)
    before = [node.name for node in given.graph.nodes]
    again = unflatten(given)
    assert [node.name for node in given.graph.nodes] == before
    with torch.no_grad():
        torch.testing.assert_close(pytree.tree_leaves(again(*copy.deepcopy(inputs))), wanted)
