"""Private parts of torch as this package expects them; a new torch that differs fails here.

Names are torch's own, so that the tests stand whatever this package calls them.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch._export.passes._node_metadata_hook import (
    _EMPTY_NN_MODULE_STACK_KEY,
    _node_metadata_hook,
)
from torch._higher_order_ops.wrap import wrap_with_autocast, wrap_with_set_grad_enabled
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.export import export
from torch.export._unlift import _convert_guards_code_to_fn, _get_input_guards_for_graph
from torch.fx import Graph
from torch.utils import _pytree as pytree

from lowerdeck.unflatten import export_preserving, unflatten
from lowerdeck.unflatten._torch_private import size_conditions
from lowerdeck_zoo import Of, exported, saved_and_loaded

TRACEPOINT: Any = torch.ops.higher_order._export_tracepoint


def test_a_modules_own_registries_are_live() -> None:
    module = torch.nn.BatchNorm1d(2)
    module.register_buffer("scratch", torch.zeros(1), persistent=False)
    module.add_module("child", torch.nn.ReLU())
    assert list(module._modules) == ["child"]
    assert list(module._parameters) == ["weight", "bias"]
    assert module._non_persistent_buffers_set == {"scratch"}
    module._non_persistent_buffers_set.clear()
    module._modules["type"] = torch.nn.Tanh()
    assert "scratch" in module.state_dict()
    assert [name for name, _ in module.named_children()] == ["child", "type"]


def test_children_and_state_are_shared_by_their_tables() -> None:
    owner, other = torch.nn.BatchNorm1d(2), torch.nn.Module()
    for name in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
        other.__dict__[name] = owner.__dict__[name]
    owner.add_module("later", torch.nn.ReLU())
    assert list(other.state_dict()) == list(owner.state_dict())
    assert [name for name, _ in other.named_children()] == ["later"]


def test_tables_of_rare_hooks_are_created_when_they_are_read() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    module = unflatten(export_preserving(model, (torch.ones(1, 2),)))
    inner: Any = module.get_submodule("0")
    plain = torch.nn.Linear(2, 2)
    late = vars(plain).keys() - vars(inner).keys() - {"in_features", "out_features"}
    assert len(late) == 7
    assert {name for name in vars(plain) if "state_dict" in name} < late
    assert {name: type(getattr(inner, name)) for name in vars(plain) if "hooks" in name} == {
        name: type(value) for name, value in vars(plain).items() if "hooks" in name
    }
    seen: list[str] = []
    inner.register_state_dict_post_hook(lambda _, state, *__: seen.append("saved"))
    inner.register_load_state_dict_post_hook(lambda *_: seen.append("loaded"))
    handle = inner.register_state_dict_pre_hook(lambda *_: seen.append("saving"))
    module.load_state_dict(copy.deepcopy(module).state_dict())
    assert seen == ["saving", "saved", "loaded"]
    handle.remove()
    inner.register_forward_hook(lambda *_, **__: seen.append("called"), with_kwargs=True)
    inner.register_forward_pre_hook(lambda *_, **__: seen.append("calling"), with_kwargs=True)
    module(torch.ones(1, 2))
    assert seen[3:] == ["calling", "called"]
    assert inner.state_dict().keys() == plain.state_dict().keys()
    assert seen[5:] == ["saved"]


def test_tensors_of_a_transform_are_told_from_others() -> None:
    is_wrapped: Any = torch._C._functorch.is_functorch_wrapped_tensor
    seen: list[bool] = []

    def squared(x: torch.Tensor) -> torch.Tensor:
        seen.append(is_wrapped(x))
        return (x * x).sum()

    torch.func.grad(squared)(torch.ones(2))
    assert seen == [True]
    assert not is_wrapped(torch.ones(2))


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_strict_export_writes_its_wrappers_name_into_stacks() -> None:
    class Doubles(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> object:
            return _Doubled.apply(self.fc(x))  # type: ignore[no-untyped-call]

    program = export(Doubles(), (torch.ones(2, 4),), strict=True)
    stacks = [node.meta.get("nn_module_stack") or {} for node in program.graph.nodes]
    assert "_export_root" in {path for stack in stacks for path, _ in stack.values()}


def test_nodes_of_torchs_passes_without_a_module_have_a_stack_of_their_own() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(2)
    node = graph.call_function(torch.ops.aten.relu.default, (x,))
    _node_metadata_hook(node)
    assert list(node.meta["nn_module_stack"]) == [_EMPTY_NN_MODULE_STACK_KEY]


def test_modes_are_switched_and_restored() -> None:
    x = torch.ones(2, 2)
    mode = _enter_autocast("cpu", torch.bfloat16, True, None)  # type: ignore[no-untyped-call]
    try:
        assert (x @ x).dtype == torch.bfloat16
    finally:
        _exit_autocast(mode)  # type: ignore[no-untyped-call]
    assert (x @ x).dtype == torch.float32
    with torch.enable_grad():
        torch._C._set_grad_enabled(False)
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()


def test_regions_carry_their_mode_and_body() -> None:
    class Modes(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                y = x + 1
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return x @ y

    program = export(Modes(), (torch.ones(2, 2),))
    targets = {node.target for node in program.graph.nodes}
    assert {wrap_with_set_grad_enabled, wrap_with_autocast} <= targets


def test_marks_of_calls_stay_in_regions_and_hand_on_their_arguments() -> None:
    class Quiet(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = torch.nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                y: torch.Tensor = self.fc(x) + 1
            return y * x

    x = torch.ones(2, 2)
    program = export(Quiet(), (x,), preserve_module_call_signature=("fc",))
    graphs = [part.graph for part in program.graph_module.modules() if hasattr(part, "graph")]
    marks = [
        (node.kwargs["path"], node.kwargs["kind"])
        for graph in graphs
        for node in graph.find_nodes(op="call_function", target=TRACEPOINT)
    ]
    kinds = ("module_call_inputs", "module_call_outputs")
    assert marks == [("_export_root.fc", kind) for kind in kinds]
    assert TRACEPOINT(x, kind=kinds[0], path="fc")[0] is x


def test_the_dialect_of_a_program_tells_whether_it_was_decomposed() -> None:
    program = export(torch.nn.ReLU(), (torch.ones(2),))
    assert str(program.dialect) == "TRAINING"
    assert str(program.run_decompositions({}).dialect) != "TRAINING"


def test_guards_of_inputs_are_python() -> None:
    dim = torch.export.Dim("n", min=3, max=9)
    program = export(torch.nn.ReLU(), (torch.ones(4),), dynamic_shapes=({0: dim},))
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    paths: Any = [(pytree.MappingKey("x"),)]
    guards = _get_input_guards_for_graph(placeholders, program.range_constraints, paths)
    check: Any = _convert_guards_code_to_fn(guards, paths).forward
    check(torch.ones(5))
    for size in (2, 10):
        with pytest.raises(AssertionError):
            check(torch.ones(size))


def test_programs_keep_notes_of_nodes_in_files() -> None:
    from lowerdeck_zoo import saved_and_loaded

    program = export(torch.nn.ReLU(), (torch.ones(2),))
    (relu,) = program.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
    relu.meta["custom"] = {"key": {"path": "text"}}
    loaded = saved_and_loaded(program)
    (relu,) = loaded.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
    assert relu.meta["custom"] == {"key": {"path": "text"}}


def test_conditions_are_those_of_torch_saved_or_not() -> None:
    def branch(x: torch.Tensor) -> torch.Tensor:
        return x.sum() if x.shape[0] < x.shape[1] else x.mean()

    varies = (({0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO},),)
    x = torch.ones(3, 24, 8)
    program = exported(Of(branch), x, dynamic_shapes=varies)
    assert any(" < " in condition for condition in size_conditions(program))
    assert size_conditions(saved_and_loaded(program)) == size_conditions(program)
    assert size_conditions(exported(Of(branch), x)) == []
