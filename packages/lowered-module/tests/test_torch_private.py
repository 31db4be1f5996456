"""What this package expects of torch's private parts."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lowerdeck.lowered_module._torch_private import (
    FakeScriptObject,
    FakeTensor,
    OpOverload,
    SpecViolationError,
    active_fake_mode,
    bare_program,
    executorch_call_delegate,
    fake_mode_of,
    pytree,
    schema_of,
    set_program_parts,
)


def test_fake_modes_are_found() -> None:
    mode = FakeTensorMode()
    assert active_fake_mode() is None
    with mode:
        assert active_fake_mode() is mode
        fake = torch.zeros(2)
    assert fake_mode_of([1, {"a": fake}]) is mode
    assert fake_mode_of([torch.zeros(1)]) is None


def test_a_bare_program_is_a_whole_program() -> None:
    program = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
    bare = bare_program(
        program.graph_module,
        program.graph_signature,
        state_dict=program.state_dict,
        constants=program.constants,
        range_constraints=program.range_constraints,
        module_call_graph=program.module_call_graph,
        verifiers=list(program.verifiers),
    )
    assert set(vars(bare)) == set(vars(program))
    bare.validate()  # type: ignore[no-untyped-call]
    x = torch.ones(1, 2)
    torch.testing.assert_close(bare.module()(x), program.module()(x))


def test_the_operator_is_torchs() -> None:
    assert executorch_call_delegate is torch.ops.higher_order.executorch_call_delegate


def test_parts_of_a_program_are_replaced_in_place() -> None:
    program = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
    signature = program.graph_signature
    state = {
        name: torch.nn.Parameter(torch.zeros_like(value))
        for name, value in program.state_dict.items()
    }
    set_program_parts(program, state_dict=state, constants={"k": torch.ones(1)})
    assert program.state_dict is state
    assert list(program.constants) == ["k"]
    assert program.graph_signature is signature
    assert not program.module()(torch.ones(1, 2)).any()


def test_a_program_that_breaks_its_rules_is_refused() -> None:
    program = torch.export.export(torch.nn.ReLU(), (torch.ones(2),))
    next(iter(reversed(program.graph.nodes))).args = ((),)
    with pytest.raises(SpecViolationError):
        program.validate()  # type: ignore[no-untyped-call]


def test_overloads_have_schemas_and_nothing_else_has() -> None:
    found = schema_of(torch.ops.aten.add_.Tensor)
    assert isinstance(torch.ops.aten.add_.Tensor, OpOverload)
    assert found is not None
    assert [a.alias_info is not None and a.alias_info.is_write for a in found.arguments] == [
        *(True, False, False)
    ]
    assert found.returns[0].alias_info is not None
    assert schema_of(len) is None
    assert schema_of("relu") is None


def test_values_of_an_exported_program_are_fake() -> None:
    program = torch.export.export(torch.nn.ReLU(), (torch.ones(2),))
    assert isinstance(next(iter(program.graph.nodes)).meta["val"], FakeTensor)
    assert isinstance(FakeScriptObject, type)


def test_trees_come_apart_and_together() -> None:
    tree = ((1, [2]), {"k": 3})
    leaves, spec = pytree.tree_flatten(tree)
    assert leaves == pytree.tree_leaves(tree) == [1, 2, 3]
    assert pytree.tree_unflatten(leaves, spec) == tree
    assert pytree.tree_structure(((5, [6]), {"k": 7})) == spec
