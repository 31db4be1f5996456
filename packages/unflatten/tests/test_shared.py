"""Shared modules and tensors: the identities that a program records, and those that it loses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram, export
from unflatten_zoo import OWN_CASES  # type: ignore[import-not-found]
from unflatten_zoo.models.state import Chain, Unsaved  # type: ignore[import-not-found]

from lowerdeck.unflatten import unflatten

BY_NAME = {str(case): case for case in OWN_CASES}
X = torch.randn(1, 2)


def tied() -> Any:
    """Return a chain of two modules that share all their state."""
    model = Chain(nn.Linear(2, 2), nn.Linear(2, 2))
    model.second.weight, model.second.bias = model.first.weight, model.first.bias
    return model


def shared() -> Any:
    """Return a chain of one module with two names."""
    layer = nn.Linear(2, 2)
    return Chain(layer, layer)


def record(program: ExportedProgram) -> Any:
    """Return all that a program records of modules: stacks, state and signature."""
    stacks = [
        (node.name, str(node.target), str(node.meta.get("nn_module_stack")))
        for node in program.graph.nodes
    ]
    entries = [(entry.fqn, entry.signature is None) for entry in program.module_call_graph]
    values = {id(value): name for name, value in reversed(program.state_dict.items())}
    names = [(name, values[id(value)]) for name, value in program.state_dict.items()]
    return stacks, entries, names, str(program.graph_signature)


def test_strict_export_distinguishes_a_shared_module_from_two_that_share_their_state() -> None:
    for model, is_one in ((tied(), False), (shared(), True)):
        module: Any = unflatten(export(model, (X,), strict=True))
        assert (module.first is module.second) is is_one
        assert module.first.weight is module.second.weight
        torch.testing.assert_close(module(X), model(X))


def test_non_strict_export_merges_two_modules_that_share_their_state() -> None:
    programs = [export(model, (X,), strict=False) for model in (tied(), shared())]
    assert record(programs[0]) == record(programs[1])
    for program in programs:
        module: Any = unflatten(program)
        assert module.first is module.second


def test_non_strict_export_does_not_record_a_shared_module_without_state() -> None:
    layer = nn.ReLU()
    models = (Chain(layer, layer), Chain(nn.ReLU(), nn.ReLU()))
    programs = [export(model, (X,), strict=False) for model in models]
    assert record(programs[0]) == record(programs[1])
    for program in programs:
        module: Any = unflatten(program)
        assert module.first is not module.second


@pytest.mark.parametrize("way", ["preserving", "preserving saved"])
def test_our_programs_record_which_modules_are_one(way: str) -> None:
    made: Any = BY_NAME["stateless twice"].unflattened(way)
    inner = made.get_submodule("1")
    assert inner is made.get_submodule("2")
    assert inner.first.first is inner.second.second
    assert inner.first.second is not inner.second.first
    made = BY_NAME["tied tables"].unflattened(way)
    assert made.one is not made.two
    assert made.same is made.two
    assert made.one.weight is made.two.weight


def test_tied_modules_are_changed_one_by_one() -> None:
    case = BY_NAME["tied tables"]
    made: Any = case.unflattened("preserving")
    eager: Any = case.module()
    x = case.calls()[0].args[0]
    for path in ("one", "two", "same"):
        handles = [
            model.get_submodule(path).register_forward_hook(lambda _, args, result: result * 2)
            for model in (eager, made)
        ]
        torch.testing.assert_close(made(x), eager(x))
        for handle in handles:
            handle.remove()
    made.one.weight = eager.one.weight = nn.Parameter(torch.randn(4, 4))
    torch.testing.assert_close(made(x), eager(x))


@pytest.mark.parametrize("is_one", [False, True])
def test_unsaved_tensors_come_back_under_every_name(is_one: bool) -> None:
    model = Chain(Unsaved(), Unsaved())
    if is_one:
        model.second = model.first
    model.second.seen, model.second.factor = model.first.seen, model.first.factor
    module: Any = unflatten(export(copy.deepcopy(model), (X,)))
    assert module.first.seen is module.second.seen
    assert module.first.factor is module.second.factor
    torch.testing.assert_close(module(X), model(X))
    assert module.first.unread.shape == (2,)


@pytest.mark.parametrize("strict", [False, True])
def test_tied_modules_of_two_types_are_two(strict: bool) -> None:
    case = BY_NAME["tied embedding"]
    made: Any = case.unflattened("strict" if strict else "plain")
    assert made.head is not made.shared
    assert made.head.weight is made.shared.weight
    assert made.encoder.embed.type_name().endswith("Embedding")
    assert made.head.type_name().endswith("Linear")


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("name", ["tied tables", "writes tied state"])
def test_state_that_modules_share_is_loaded_and_given(name: str, assign: bool) -> None:
    case = BY_NAME[name]
    made, eager = case.unflattened("preserving"), case.module()
    with torch.no_grad():
        for value in eager.parameters():
            value.mul_(0.5)
    made.load_state_dict(eager.state_dict(), assign=assign)
    args = case.calls()[0].args
    wanted = copy.deepcopy(eager)(*args)
    torch.testing.assert_close(copy.deepcopy(made)(*args), wanted)
    state = {**dict(made.named_parameters()), **dict(made.named_buffers())}
    again = torch.func.functional_call(made, copy.deepcopy(state), args)
    torch.testing.assert_close(again, wanted)
