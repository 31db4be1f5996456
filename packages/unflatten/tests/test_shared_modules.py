"""Which names are one module or one tensor: what a program tells, and what it does not."""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram, export
from unflatten_comparison import compare  # type: ignore[import-not-found]

from lowerdeck.unflatten import unflatten

if TYPE_CHECKING:

    class Model(nn.Module):
        """A module whose attributes may be anything."""

        def __getattr__(self, name: str) -> Any: ...

else:
    Model = nn.Module


class Chain(Model):
    """Calls two children, which may be one module."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first = first
        self.second = second

    def forward(self, x: Tensor) -> Any:
        return self.second(self.first(x))


def tied() -> Chain:
    """Return a chain of two modules that share all their state."""
    model = Chain(nn.Linear(2, 2), nn.Linear(2, 2))
    model.second.weight = model.first.weight
    model.second.bias = model.first.bias
    return model


def shared() -> Chain:
    """Return a chain of one module with two names."""
    layer = nn.Linear(2, 2)
    return Chain(layer, layer)


def record(program: ExportedProgram) -> Any:
    """Return all that a program tells about modules: stacks, state and signature."""
    stacks = [
        (node.name, str(node.target), str(node.meta.get("nn_module_stack")))
        for node in program.graph.nodes
    ]
    entries = [(entry.fqn, entry.signature is None) for entry in program.module_call_graph]
    values = {id(value): name for name, value in reversed(program.state_dict.items())}
    names = [(name, values[id(value)]) for name, value in program.state_dict.items()]
    return stacks, entries, names, str(program.graph_signature)


def test_strict_export_tells_a_shared_module_from_two_that_share_their_state() -> None:
    x = torch.randn(1, 2)
    for model, is_one in ((tied(), False), (shared(), True)):
        for program in _both(export(model, (x,), strict=True)):
            module: Any = unflatten(program)
            assert (module.first is module.second) is is_one
            assert module.first.weight is module.second.weight
            compare(copy.deepcopy(model), module, (x,))


def test_non_strict_export_does_not_tell_so_that_both_become_one_module() -> None:
    x = torch.randn(1, 2)
    programs = [export(model, (x,), strict=False) for model in (tied(), shared())]
    assert record(programs[0]) == record(programs[1])
    for program in programs:
        module: Any = unflatten(program)
        assert module.first is module.second


def test_non_strict_export_does_not_tell_a_shared_module_without_state_from_two() -> None:
    x, layer = torch.randn(1, 2), nn.ReLU()
    models = (Chain(layer, layer), Chain(nn.ReLU(), nn.ReLU()))
    programs = [export(model, (x,), strict=False) for model in models]
    assert record(programs[0]) == record(programs[1])
    for program in programs:
        module: Any = unflatten(program)
        assert module.first is not module.second
    module = unflatten(export(models[0], (x,), strict=True))
    assert module.first is not module.second


class Mixed(Model):
    def __init__(self) -> None:
        super().__init__()
        for number in range(4):
            self.register_buffer(f"b{number}", torch.ones(2) * number, persistent=number % 2 == 1)

    def forward(self, x: Tensor) -> Any:
        return x + self.b3 - self.b2 * self.b1 + self.b0


@pytest.mark.parametrize("form", [0, 1])
def test_buffers_keep_their_order_whether_they_are_saved_or_not(form: int) -> None:
    model, x = Mixed(), torch.randn(1, 2)
    module = unflatten(_both(export(model, (x,), strict=False))[form])
    assert list(dict(module.named_buffers())) == ["b0", "b1", "b2", "b3"]
    assert list(module.state_dict()) == ["b1", "b3"]
    compare(model, module, (x,))


def _both(program: ExportedProgram) -> tuple[ExportedProgram, ExportedProgram]:
    with warnings.catch_warnings():
        # torch's own passes warn of torch's own deprecations.
        warnings.simplefilter("ignore")
        return program, program.run_decompositions()
