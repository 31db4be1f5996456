"""``graph`` and ``graph_module`` of every module are there as torch's ``unflatten`` gives them."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Interpreter

from lowerdeck.unflatten import (
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
    """Return what a graph runs; torch counts the calls of a module, we its forms."""
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
        form = made.get_submodule(path)
        torch.testing.assert_close(form(X), made.step.work(X) * (0.5, 0.25, 0.1)[number])


def test_a_module_in_the_place_of_forms_is_never_taken_for_one() -> None:
    made: Any = unflatten(torch.export.export(Steps().eval(), (X,)))
    made.step = nn.Sequential(made.step)
    torch.testing.assert_close(made(X), made(X))
    with pytest.raises(AttributeError):
        made.graph_module(X)


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
