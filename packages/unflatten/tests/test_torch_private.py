"""What this package expects of what is private in torch; a new torch that differs fails here."""

from __future__ import annotations

import pytest
import sympy  # type: ignore[import-untyped]
import torch
from torch._export.passes._node_metadata_hook import _node_metadata_hook
from torch.export import export
from torch.fx import Graph

from lowerdeck.unflatten import _torch_private as private


def test_operators_have_names() -> None:
    assert torch.ops.higher_order.cond.__name__ == "cond"
    assert private.packet_name(torch.ops.aten.add.Tensor) == "add"
    assert private.packet_name(len) is None


def test_native_functions_are_those_of_nn_functional() -> None:
    for name in ("linear", "gelu", "scaled_dot_product_attention"):
        assert getattr(private.NATIVE_FUNCTIONS, name) is getattr(torch.nn.functional, name)
    x = torch.randn(3)
    torch.testing.assert_close(private.NATIVE_FUNCTIONS.silu(x), torch.nn.functional.silu(x))


def test_sizes_are_computed_with_these_functions() -> None:
    t = sympy.Symbol("t", integer=True, positive=True)
    functions = private.SIZE_FUNCTIONS
    assert functions.FloorDiv(functions.FloorDiv(t, 2), 3) == functions.FloorDiv(t, 6)
    assert functions.CleanDiv(2 * t, 2) == t
    assert functions.Max(t, 2 * t, 3).args
    for name, size in {
        "PythonMod": functions.PythonMod(t, 3),
        "TruncToInt": functions.TruncToInt(functions.FloatTrueDiv(functions.ToFloat(t), 2.5)),
        "CeilToInt": functions.CeilToInt(functions.IntTrueDiv(t, 4)),
        "FloorToInt": functions.FloorToInt(functions.IntTrueDiv(t, 4)),
        "Min": functions.Min(t, 4),
    }.items():
        assert type(size).__name__ == name


def test_a_size_is_between_those_of_its_symbols() -> None:
    b, t = sympy.symbols("b t", integer=True, positive=True)
    assert private.bounds_of_size(b * t, {b: [4, 5], t: [None, 8]}) == (4, 40)
    assert private.bounds_of_size(b - t, {b: [None, 5]}) == (None, 4)
    assert private.bounds_of_size(b * t, {b: [8, 5]}) == (None, None)
    assert private.bounds_of_size(b * t, {b: [None, 0]}) == (None, None)
    remainder = private.SIZE_FUNCTIONS.PythonMod(t, 4)
    assert private.bounds_of_size(remainder, {}) == (0, 3)


def test_a_modules_own_registries_are_live() -> None:
    module = torch.nn.BatchNorm1d(2)
    module.register_buffer("scratch", torch.zeros(1), persistent=False)
    module.add_module("child", torch.nn.ReLU())
    assert list(private.children_of(module)) == ["child"]
    assert list(private.parameters_of(module)) == ["weight", "bias"]
    assert "scratch" in private.buffers_of(module)
    assert private.unsaved_buffers_of(module) == {"scratch"}
    private.unsaved_buffers_of(module).clear()
    private.children_of(module)["type"] = torch.nn.Tanh()
    assert "scratch" in module.state_dict()
    assert [name for name, _ in module.named_children()] == ["child", "type"]


def test_the_frame_of_a_modules_call_has_the_module_and_what_it_is_given() -> None:
    class Fails(torch.nn.Module):
        def forward(self, x: torch.Tensor, **_: object) -> None:
            raise ValueError(x)

    module, x = Fails(), torch.ones(1)
    with pytest.raises(ValueError, match="tensor") as caught:
        module(x, by=2)
    frames = [step.frame for step in caught.traceback]
    (held,) = [one.f_locals for one in frames if one.code.raw is private.CALL_MODULE]
    assert held["self"] is module
    assert held["args"] == (x,)


def test_tensors_of_a_transform_are_told_from_others() -> None:
    seen: list[bool] = []

    def squared(x: torch.Tensor) -> torch.Tensor:
        seen.append(private.is_wrapped_by_transform(x))
        return (x * x).sum()

    torch.func.grad(squared)(torch.ones(2))
    assert seen == [True]
    assert not private.is_wrapped_by_transform(torch.ones(2))
    assert not private.is_wrapped_by_transform("text")


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
    assert private.TRACER_ROOT in {path for stack in stacks for path, _ in stack.values()}


def test_nodes_of_torchs_passes_without_a_module_have_a_stack_of_their_own() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(2)
    node = graph.call_function(torch.ops.aten.relu.default, (x,))
    _node_metadata_hook(node)
    assert list(node.meta["nn_module_stack"]) == [private.EMPTY_STACK_KEY]


def test_modes_are_switched_and_restored() -> None:
    x = torch.ones(2, 2)
    mode = private.ENTER_AUTOCAST("cpu", torch.bfloat16, True, None)
    try:
        assert (x @ x).dtype == torch.bfloat16
    finally:
        private.EXIT_AUTOCAST(mode)
    assert (x @ x).dtype == torch.float32
    with torch.enable_grad():
        private.SET_GRAD_MODE(False)
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()


def test_mode_regions_carry_their_mode_and_body() -> None:
    class Modes(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                y = x + 1
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return x @ y

    program = export(Modes(), (torch.ones(2, 2),))
    targets = {node.target for node in program.graph.nodes}
    assert {private.GRAD_MODE_REGION, private.AUTOCAST_REGION} <= targets


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
        node
        for graph in graphs
        for node in graph.find_nodes(op="call_function", target=private.TRACEPOINT)
    ]
    path = f"{private.TRACER_ROOT}.fc"
    assert [(mark.kwargs["path"], mark.kwargs["kind"]) for mark in marks] == [
        (path, "module_call_inputs"),
        (path, "module_call_outputs"),
    ]
    assert private.TRACEPOINT(x, kind="module_call_inputs", path="fc")[0] is x


def test_children_and_state_are_shared_by_what_holds_them() -> None:
    owner, other = torch.nn.BatchNorm1d(2), torch.nn.Module()
    private.shares_children_and_state(other, owner)
    owner.add_module("later", torch.nn.ReLU())
    assert list(other.state_dict()) == list(owner.state_dict())
    assert [name for name, _ in other.named_children()] == ["later"]


def test_a_program_without_tokens_is_not_copied() -> None:
    program = export(torch.nn.ReLU(), (torch.ones(2),))
    assert private.without_effect_tokens(program) is program


def test_module_state_is_what_the_constructor_sets() -> None:
    made, other, plain = private.module_state(), private.module_state(), vars(torch.nn.Module())
    assert list(made) == list(plain)
    for name, value in plain.items():
        assert type(made[name]) is type(value)
        assert made[name] == value
        if isinstance(value, (dict, list, set)):
            assert made[name] is not other[name]
        else:
            assert value is None or isinstance(value, (bool, int, str))


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
@pytest.mark.parametrize("of_all", [False, True])
def test_hooks_are_found_wherever_they_are_registered(kind: str, of_all: bool) -> None:
    module = torch.nn.Linear(2, 2)
    owner, prefix = (torch.nn.modules.module, "module_") if of_all else (module, "")
    assert not private.runs_more_than_forward(module)
    handle = getattr(owner, f"register_{prefix}{kind}_hook")(lambda *_: None)
    assert private.runs_more_than_forward(module)
    assert private.has_hooks(module) == (not of_all)
    handle.remove()
    assert not private.has_hooks(module)
    assert not private.runs_more_than_forward(module)


def test_a_move_reaches_every_module_by_apply() -> None:
    made = torch.nn.Sequential(private.MovesConstants())
    made[0].plain = torch.ones(2)
    made.to("meta", torch.float64)
    assert (made[0].plain.device.type, made[0].plain.dtype) == ("meta", torch.float32)
    made.to_empty(device="cpu")
    torch.testing.assert_close(made[0].plain, torch.ones(2))


def test_hooks_run_in_forward_with_what_those_before_returned() -> None:
    module, x = torch.nn.Identity(), torch.ones(2)
    module.register_forward_pre_hook(lambda _, args: (args[0] + 1,))
    module.register_forward_hook(lambda _, args, result: result * args[0])
    wanted = module(x)
    with private.hooks_inside(module):
        assert not [*module._forward_hooks, *module._forward_pre_hooks]
        # Their forward is none of the class that callers might run by itself.
        assert private.runs_more_than_forward(module)
        assert type(module).__qualname__ == "Identity"
        torch.testing.assert_close(module(x), wanted)
        torch.testing.assert_close(module.forward(x), wanted)
    assert type(module) is torch.nn.Identity
    assert private.runs_more_than_forward(module)
    torch.testing.assert_close(module(x), wanted)


def test_each_backward_pass_is_told_from_others_and_from_none() -> None:
    found: list[int] = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda _: found.append(private.running_backward()))  # type: ignore[no-untyped-call]
    for _ in range(2):
        x.sum().backward()  # type: ignore[no-untyped-call]
    found.append(private.running_backward())
    assert len(set(found)) == 3
    assert found[-1] == -1
