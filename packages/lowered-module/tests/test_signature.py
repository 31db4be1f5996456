"""Partitions as programs of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lowered_helpers import calls_of, core
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from lowerdeck.lowered_module import OwnershipError, create_submodule_from_nodes
from lowerdeck.lowered_module.program.signature import SignatureIndex, sub_program
from lowerdeck_zoo import Holding


class Model(
    Holding, weight=lambda: torch.nn.Parameter(torch.randn(2)), count=lambda: torch.zeros(2)
):
    """Reads its weights late, so that first use and declaration differ."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = x * y + torch.tensor([1.0, 2.0])
        self.count.add_(a.detach())
        return a * self.weight, self.count + 1


def program() -> ExportedProgram:
    return core(Model(), torch.ones(2), torch.ones(2))


def cut(owner: ExportedProgram, *owned: str, index: SignatureIndex | None = None) -> Any:
    """Return what ``sub_program`` returns for all calls of a program."""
    submodule, call = create_submodule_from_nodes(owner.graph_module, calls_of(owner), "tag")
    mine = [node for node in submodule.graph.find_nodes(op="placeholder") if node.name in owned]
    return sub_program(submodule, owner, mine, call, index or SignatureIndex.of(owner))


def test_owned_inputs_come_first_by_kind() -> None:
    constant = next(iter(program().graph_signature.inputs_to_lifted_tensor_constants))
    for owned in (["p_weight", "b_count", constant], ["b_count"]):
        owner = program()
        part, _, _ = cut(owner, *owned)
        names = [node.name for node in part.graph.find_nodes(op="placeholder")]
        assert names[: len(owned)] == owned
        assert sorted(names) == sorted(["p_weight", "b_count", constant, "x", "y"])
        part.graph.lint()


def test_a_partition_becomes_a_program_and_says_what_it_took() -> None:
    owner = program()
    expected = owner.module()(torch.ones(2), torch.ones(2))
    part, inputs, outputs = cut(owner, "p_weight", "b_count")
    part.validate()
    assert sorted(inputs) == ["b_count", "p_weight"]
    assert [[spec.kind for spec in specs] for specs in outputs.values()] == [
        [OutputKind.BUFFER_MUTATION]
    ]
    assert part.graph_signature.output_specs[0].kind is OutputKind.BUFFER_MUTATION
    assert [spec.kind for spec in part.graph_signature.input_specs[:2]] == [
        InputKind.PARAMETER,
        InputKind.BUFFER,
    ]
    assert part.state_dict["weight"] is owner.state_dict["weight"]
    constant = next(iter(owner.constants.values()))
    arguments = {"x": torch.ones(2), "y": torch.ones(2)}
    given = [arguments.get(name, constant) for name in part.graph_signature.user_inputs]
    owner.state_dict["count"].zero_()
    torch.testing.assert_close(part.module()(*given), expected)


def test_in_a_nested_graph_nothing_is_owned() -> None:
    owner = program()
    part, inputs, outputs = cut(owner, "p_weight", index=SignatureIndex())
    assert not inputs
    assert not outputs
    assert not part.state_dict
    assert len(part.graph_signature.user_inputs) == 5


def test_an_owned_input_must_have_a_value() -> None:
    owner = program()
    owner.state_dict.pop("weight")
    with pytest.raises(OwnershipError, match="neither in the state dict"):
        cut(owner, "p_weight")
