"""Graphs of modules: as torch's ``unflatten`` gives them, and as ``torch.fx`` traces them."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export
from torch.fx import PH, Graph, GraphModule, Interpreter, symbolic_trace  # type: ignore[attr-defined]
from torch.utils import _pytree as pytree
from unflatten_zoo import OWN_CASES  # type: ignore[import-not-found]
from unflatten_zoo.judges import assert_same, compare_calls  # type: ignore[import-not-found]

from lowerdeck.unflatten import (
    FlatArgsAdapter,
    InputConstraintError,
    InputStructureError,
    InterpreterModule,
    UnflattenError,
    export_preserving,
    unflatten,
)

# torch.cond looks at gradients of what is no leaf.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


class Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.work = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, t: float) -> Tensor:
        result: Tensor = self.work(x) * t
        return result


class Steps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.BatchNorm1d(4)) for _ in range(2)
        )
        self.step = Step()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        for t in (0.5, 0.25, 0.1):
            x = self.step(x, t)
        return x


class Chooses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.bias = torch.ones(4)

    def forward(self, x: Tensor) -> Any:
        x = self.inner(x) + self.bias
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"graph": nn.Linear(4, 4), "graph_module": nn.Linear(4, 4)})

    def forward(self, x: Tensor) -> Any:
        return self.inner["graph_module"](self.inner["graph"](x))


MODELS: tuple[Callable[[], nn.Module], ...] = (Steps, Chooses)
X = torch.linspace(-1, 1, 12).view(3, 4)


def steps_of(graph: Graph) -> list[tuple[str, str]]:
    """Return what a graph runs; torch counts the calls of a module, we its specializations."""
    return [
        (node.op, str(node.target).replace("..0", "").replace("@", "..").replace("_graph_", "_"))
        for node in graph.nodes
        if node.op in {"call_module", "call_function", "output"}
    ]


@pytest.mark.parametrize("model", MODELS)
def test_graphs_run_what_torchs_do(model: Callable[[], nn.Module]) -> None:
    program = torch.export.export(model().eval(), (X,))
    made, theirs = unflatten(program), torch.export.unflatten(program)
    compared = 0
    for path, module in theirs.named_modules():
        view = vars(module).get("graph_module")
        if not isinstance(view, GraphModule) or "@" in path:
            continue
        ours: Any = made.get_submodule(path)
        assert isinstance(ours.graph, Graph)
        assert steps_of(ours.graph) == steps_of(view.graph)
        assert isinstance(ours.graph_module, GraphModule)
        assert ours.graph_module.graph is ours.graph
        assert ours.graph_module is ours.graph_module
        compared += 1
    assert compared >= 3


@pytest.mark.parametrize("model", MODELS)
def test_graph_modules_compute_what_their_modules_do(model: Callable[[], nn.Module]) -> None:
    eager = model().eval()
    made = unflatten(torch.export.export(eager, (X,)))
    wanted = eager(X)
    (found,) = made.graph_module(X)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(Interpreter(made.graph_module).run(X)[0], wanted)
    torch.testing.assert_close(copy.deepcopy(made.graph_module)(X)[0], wanted)
    for module in made.modules():
        if isinstance(module, InterpreterModule):
            module.graph_module.graph.lint()


def test_every_call_in_a_graph_names_a_module() -> None:
    made: Any = unflatten(torch.export.export(Steps().eval(), (X,)))
    calls = [str(node.target) for node in made.graph.find_nodes(op="call_module")]
    assert calls == ["layers.0", "layers.1", "step..0", "step..1", "step..2"]
    assert {"work", "call_modules", "training"} <= {*dir(made.step)}
    for number, path in enumerate(calls[2:]):
        one = made.get_submodule(path)
        torch.testing.assert_close(one(X), made.step.work(X) * (0.5, 0.25, 0.1)[number])


class Keyword(nn.Module):
    def forward(self, x: Tensor, **others: Tensor) -> Tensor:
        return x + others["a-b"]


class CallsByKeyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Keyword()

    def forward(self, x: Tensor, **others: Tensor) -> Any:
        return self.inner(x, **others)


def test_what_torch_fx_has_no_code_for_is_said() -> None:
    x = torch.ones(2)
    made: Any = unflatten(export_preserving(CallsByKeyword(), (x,), {"a-b": x}))
    torch.testing.assert_close(made(x, **{"a-b": x}), x * 2)
    assert isinstance(made.inner.graph_module, GraphModule)
    with pytest.raises(UnflattenError, match="a keyword that is no name in Python"):
        _ = made.graph_module
    assert "a-b" in str(made.graph)


def test_an_edited_graph_is_compiled_by_its_graph_module() -> None:
    made: Any = unflatten(torch.export.export(Steps().eval(), (X,)))
    relu = made.layers[0][1]
    (node,) = relu.graph_module.graph.find_nodes(
        op="call_function", target=torch.ops.aten.relu.default
    )
    node.target = torch.ops.aten.tanh.default
    view = relu.graph_module
    view.recompile()
    torch.testing.assert_close(relu(X), X.tanh())
    torch.testing.assert_close(view(X), X.tanh())
    assert relu.graph_module is view
    relu.recompile()
    torch.testing.assert_close(relu.graph_module(X), X.tanh())


def test_graph_modules_follow_their_modules() -> None:
    made: Any = unflatten(torch.export.export(Steps().eval(), (X,)))
    view, other = made.layers[1].graph_module, copy.deepcopy(made)
    made.layers[1].set_submodule("0", nn.Identity())
    torch.testing.assert_close(view(X), made.layers[1](X))
    assert other.layers[1].graph_module is not view
    data = io.BytesIO()
    torch.save(made.layers[1].graph_module, data)
    loaded = torch.load(io.BytesIO(data.getvalue()), weights_only=False)
    torch.testing.assert_close(loaded(X), view(X))


def test_lists_of_modules_have_empty_graphs_unless_a_child_has_that_name() -> None:
    made: Any = unflatten(torch.export.export(Steps().eval(), (X,)))
    assert isinstance(made.layers.graph, Graph)
    assert not made.layers.graph.nodes
    assert isinstance(made.layers.graph_module, GraphModule)
    named: Any = unflatten(torch.export.export(Named().eval(), (X,)))
    assert isinstance(named.inner.graph, InterpreterModule)
    assert isinstance(named.inner.graph_module, InterpreterModule)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: int = 2, *, shift: Any = None) -> Any:
        y = self.fc(x).view(-1, 2, 2).expand(2, 2, 2).reshape(2, 4) * scale
        return y if shift is None else (y + shift["by"], [shift["twice"][0]])


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Scaled(), Scaled()

    def forward(self, x: Tensor, parts: Any, scale: float = 1.0) -> Any:
        y = self.one(x, 3) + parts["a"][0].float().float()
        other = y.neg()
        y, (z,) = self.two(y, shift={"by": parts["a"][1], "twice": (x, other)})
        return {"y": self.one(y, 2) * scale, "z": z + other}


Y = torch.randn(2, 4)
PARTS = {"a": [Y + 1, Y + 2]}


@pytest.mark.parametrize("record", [export, export_preserving])
@pytest.mark.parametrize("decomposed", [False, True])
def test_a_trace_with_and_without_concrete_arguments(record: Any, decomposed: bool) -> None:
    eager = Structured()
    program = record(eager, (Y, PARTS, 0.5))
    program = program.run_decompositions() if decomposed and record is export else program
    wanted = eager(Y, PARTS, 0.5)
    concrete: dict[str, Any] = {"scale": 0.5}
    # Eager takes a proxy apart as it does a dict.
    assert_same(symbolic_trace(unflatten(program), concrete)(Y, PARTS, 0.5), wanted)
    concrete["parts"] = pytree.tree_map(lambda _: PH, PARTS)
    assert_same(symbolic_trace(unflatten(program), concrete)(Y, PARTS, 0.5), wanted)
    in_order: Any = (PH, concrete["parts"], 0.5)
    assert_same(symbolic_trace(unflatten(program), in_order)(Y, PARTS, 0.5), wanted)


def test_a_preserved_child_is_traced_alone() -> None:
    eager = Structured()
    module: Any = unflatten(export_preserving(eager, (Y, PARTS)))
    traced = symbolic_trace(module.two, {"shift": {"by": PH, "twice": (PH, PH)}})
    shift = {"by": Y, "twice": (Y, Y)}
    assert_same(traced(Y, shift), eager.two(Y, shift=shift))


@pytest.mark.parametrize(
    "name",
    ["counts thrice", "reads an old value", "swaps buffers", "norms thrice", "writes results"],
)
def test_a_trace_has_the_writes_of_buffers(name: str) -> None:
    # Eager's own trace runs them once, while it traces.
    case = next(case for case in OWN_CASES if case.name == name)
    for way in ("plain", "decomposed"):
        module = case.unflattened(way)
        before = copy.deepcopy(dict(module.state_dict()))
        traced: Any = symbolic_trace(module)
        assert_same(dict(module.state_dict()), before)
        compare_calls(case, traced)
        traced.graph.eliminate_dead_code()
        traced.recompile()
        eager = case.module()
        eager.load_state_dict(module.state_dict())
        compare_calls(case, traced, eager)


def test_keywords_that_python_cannot_spell_are_traced() -> None:
    class Keywords(nn.Module):
        def forward(self, x: Tensor, **others: Any) -> Any:
            return x + others["a-b"] * others["c"]

    options = {"a-b": Y + 1, "c": Y + 2}
    module = unflatten(export(Keywords(), (Y,), options))
    assert_same(symbolic_trace(module)(Y, **options), Keywords()(Y, **options))


def test_symbolic_sizes_are_traced() -> None:
    class Sizes(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            return x.reshape(x.shape[0] * 2, -1).sum(1) * y.shape[0]

    rows = Dim("rows")
    program = export(Sizes(), (Y, Y), dynamic_shapes=({0: rows}, {0: rows}))
    traced = symbolic_trace(unflatten(program))
    for count in (2, 5):
        x = torch.randn(count, 4)
        assert_same(traced(x, x), Sizes()(x, x))


def test_a_constant_that_a_trace_would_ignore_is_refused() -> None:
    module = unflatten(export(Scaled(), (Y, 3)))
    with pytest.raises(InputConstraintError, match=r"'scale' was .* constant 3; .*concrete_args"):
        symbolic_trace(module)
    with pytest.raises(InputConstraintError, match="'scale' was exported as the constant 3"):
        symbolic_trace(module, {"scale": 4})


class Takes(FlatArgsAdapter):
    def adapt(
        self, target_spec: Any, input_spec: Any, input_args: list[Any], *_: Any, **__: Any
    ) -> list[Any]:
        return input_args[: target_spec.num_leaves]


def test_a_trace_goes_through_an_adapter_where_arguments_are_given_one_by_one() -> None:
    module = unflatten(export(nn.Sequential(nn.Linear(4, 4)), (Y,)), Takes())
    leaves: Any = (PH, PH)
    traced = symbolic_trace(module, leaves)
    assert_same(traced(Y, Y), module(Y, Y))
    with pytest.raises(InputStructureError, match="concrete_args"):
        symbolic_trace(module)


def test_a_structure_that_hides_its_leaves_is_refused() -> None:
    class Pair(tuple[Any, ...]):
        __slots__ = ()

    def keyed(pair: Pair) -> Any:
        return [(pytree.SequenceKey(index), part) for index, part in enumerate(pair)], None

    pytree.register_pytree_node(
        Pair,
        lambda pair: (list(pair), None),
        lambda leaves, _: Pair(leaves),
        flatten_with_keys_fn=keyed,
    )

    class Adds(nn.Module):
        def forward(self, pair: Any) -> Any:
            return pair[0] + pair[1]

    module = unflatten(export(Adds(), (Pair([Y, Y]),), strict=False))
    traced = symbolic_trace(module, {"pair": Pair([PH, PH])})
    assert_same(traced(Pair([Y, Y])), Y + Y)
    with pytest.raises(InputStructureError, match=r"'pair' is a Proxy .*concrete_args"):
        symbolic_trace(module)
