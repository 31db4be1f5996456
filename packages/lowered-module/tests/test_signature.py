"""Surgery on graphs and signatures through its public functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lowered_helpers import calls_of, core
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, OutputSpec, TensorArgument
from torch.fx import GraphModule, Node

from lowerdeck.lowered_module import (
    OwnershipError,
    SignatureError,
    arrange_graph_outputs,
    arrange_graph_placeholders,
    create_exported_program_from_submodule,
    create_submodule_from_nodes,
)
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


def cut(owner: ExportedProgram, *owned: str) -> tuple[GraphModule, Node]:
    submodule, call = create_submodule_from_nodes(owner.graph_module, calls_of(owner), "tag")
    for node in submodule.graph.find_nodes(op="placeholder"):
        if node.name in owned:
            node.meta["delegation_tag"] = "tag"
    return submodule, call


def test_owned_inputs_come_first_by_kind() -> None:
    constant = next(iter(program().graph_signature.inputs_to_lifted_tensor_constants))
    for owned in (["p_weight", "b_count", constant], ["b_count"]):
        owner = program()
        submodule, _ = cut(owner, *owned)
        arrange_graph_placeholders(submodule, owner, "tag")
        names = [node.name for node in submodule.graph.find_nodes(op="placeholder")]
        assert names[: len(owned)] == owned
        assert sorted(names) == sorted(["p_weight", "b_count", constant, "x", "y"])
        submodule.graph.lint()


def test_a_partition_becomes_a_program_and_says_what_it_took() -> None:
    owner = program()
    expected = owner.module()(torch.ones(2), torch.ones(2))
    submodule, call = cut(owner, "p_weight", "b_count")
    part, inputs, outputs = create_exported_program_from_submodule(
        submodule, owner, "tag", call, False
    )
    part.validate()  # type: ignore[no-untyped-call]
    assert sorted(inputs) == ["b_count", "p_weight"]
    assert [spec.kind for spec in outputs.values()] == [OutputKind.BUFFER_MUTATION]
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
    submodule, call = cut(owner, "p_weight")
    part, inputs, outputs = create_exported_program_from_submodule(
        submodule, owner, "tag", call, True
    )
    assert not inputs
    assert not outputs
    assert not part.state_dict
    assert len(part.graph_signature.user_inputs) == 5


def test_an_owned_input_must_have_a_value() -> None:
    owner = program()
    submodule, call = cut(owner, "p_weight")
    owner.state_dict.pop("weight")
    with pytest.raises(OwnershipError, match="neither in the state dict"):
        create_exported_program_from_submodule(submodule, owner, "tag", call, False)


def test_mutations_come_before_other_outputs_and_getitems_follow() -> None:
    owner = program()
    submodule, call = cut(owner)
    values: Any = submodule.graph.output_node().args[0]
    specs = [
        OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(value.name), None) for value in values
    ]
    specs[-1] = OutputSpec(OutputKind.BUFFER_MUTATION, TensorArgument(values[-1].name), "count")
    read = {user.name: values[user.args[1]].name for user in call.users}
    arrange_graph_outputs(submodule, specs, call)
    now: Any = submodule.graph.output_node().args[0]
    assert now[0] is values[-1]
    assert [spec.kind for spec in specs] == [OutputKind.BUFFER_MUTATION] + [
        OutputKind.USER_OUTPUT
    ] * (len(values) - 1)
    assert {user.name: now[user.args[1]].name for user in call.users} == read
    with pytest.raises(SignatureError, match="output specs were given"):
        arrange_graph_outputs(submodule, specs[1:], call)
