# ruff: noqa: A002
"""Programs that torch hands on with something wrong."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from lowerdeck.torch_base import repair_program


class Builtins(nn.Module):
    """Inputs whose names Python's builtins have, one of them read, written and returned."""

    def forward(
        self, input: Tensor, dict: dict[str, Tensor], max: Tensor, id: int
    ) -> tuple[Tensor, ...]:
        input.add_(1)
        return input, dict["a"] + id, max * 2, max


def program() -> torch.export.ExportedProgram:
    x = torch.arange(4.0)
    return torch.export.export(Builtins(), (x, {"a": x}, x, 3))


def names(exported: torch.export.ExportedProgram) -> list[str]:
    return [node.name for node in exported.graph.find_nodes(op="placeholder")]


def test_inputs_of_a_deep_copy_are_called_as_the_signature_says() -> None:
    exported = program()
    assert repair_program(exported) is exported
    broken = copy.deepcopy(exported)
    before = names(broken)
    assert before != names(exported), "torch is repaired: this can go"
    copied = repair_program(broken)
    assert names(broken) == before
    assert names(copied) == names(exported)
    assert copied.state_dict is broken.state_dict
    copied.validate()  # type: ignore[no-untyped-call]
    x = torch.arange(4.0)
    given = (x.clone(), {"a": x}, x, 3)
    for left, right in zip(copied.module()(*given), Builtins()(*given), strict=True):
        assert torch.equal(left, right - 1 if left is given[0] else right)


def test_names_that_shift_in_a_copy_are_put_back() -> None:
    class Shifted(nn.Module):
        def forward(self, input: Tensor, input_1: Tensor) -> Tensor:
            return input - input_1

    exported = torch.export.export(Shifted(), (torch.ones(2), torch.zeros(2)))
    copied = copy.deepcopy(copy.deepcopy(exported))
    copied = repair_program(copied)
    assert names(copied) == ["input", "input_1"]
    # Code that torch (2.13) makes of either program subtracts the first input from itself.
    reads = next(node for node in copied.graph.nodes if node.op == "call_function").args
    assert reads == tuple(copied.graph.find_nodes(op="placeholder"))


def test_a_name_that_another_node_has_stays_away() -> None:
    copied = copy.deepcopy(program())
    first = copied.graph.find_nodes(op="placeholder")[0]
    other = next(node for node in copied.graph.nodes if node.op == "call_function")
    changed = first.name
    other.name = "input"
    copied = repair_program(copied)
    assert first.name == changed


def test_specialized_sizes_are_numbers() -> None:
    auto = torch.export.Dim.AUTO
    exported = torch.export.export(
        nn.Linear(4, 2), (torch.ones(3, 4),), dynamic_shapes={"input": {0: auto, 1: auto}}
    )
    value = exported.graph.find_nodes(op="placeholder")[-1].meta["val"]
    assert isinstance(value.shape[1], torch.SymInt), "torch is repaired: this can go"
    guards = len(value.fake_mode.shape_env.guards)
    copied = repair_program(exported)
    sizes = copied.graph.find_nodes(op="placeholder")[-1].meta["val"].shape
    assert isinstance(sizes[0], torch.SymInt)
    assert type(sizes[1]) is int
    assert len(value.fake_mode.shape_env.guards) == guards
    assert isinstance(value.shape[1], torch.SymInt)
    assert repair_program(copied) is copied
