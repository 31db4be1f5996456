"""Graphs of modules: as torch's ``unflatten`` gives them, and as ``torch.fx`` traces them."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import export
from torch.fx import Graph, GraphModule, Interpreter, symbolic_trace
from unflatten_zoo import OWN_CASES  # type: ignore[import-not-found]
from unflatten_zoo.judges import assert_same, compare_calls  # type: ignore[import-not-found]

from lowerdeck.unflatten import (
    InputConstraintError,
    InterpreterModule,
    export_preserving,
    unflatten,
)

# torch.cond looks at gradients of tensors that are not leaves.
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


@dataclass
class Pair:
    """A result of a class, as transformers has it."""

    first: Tensor
    second: dict[Key, Tensor]


class Key(Enum):
    """Keys that torch.fx cannot print."""

    ONE = 1


torch.export.register_dataclass(Pair)


class TakesPair(nn.Module):
    def forward(self, pair: Pair) -> Pair:
        return Pair(pair.first + 1, {Key.ONE: pair.second[Key.ONE] * 2})


class PassesPairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = TakesPair(), TakesPair()

    def forward(self, x: Tensor) -> Tensor:
        pair: Pair = self.two(self.one(Pair(x, {Key.ONE: x})))
        return pair.first - pair.second[Key.ONE]


def test_graph_modules_take_and_return_classes() -> None:
    eager = PassesPairs()
    made = unflatten(export_preserving(eager, (X,)))
    for module in (made, pickle.loads(pickle.dumps(made))):
        torch.testing.assert_close(module(X), eager(X))
        torch.testing.assert_close(module.graph_module(X)[0], eager(X))
    made.set_submodule("one", TakesPair())
    torch.testing.assert_close(made(X), eager(X))


def test_every_call_in_a_graph_names_a_module() -> None:
    made: Any = unflatten(torch.export.export(Steps().eval(), (X,)))
    calls = [str(node.target) for node in made.graph.find_nodes(op="call_module")]
    assert calls == ["layers.0", "layers.1", "step..0", "step..1", "step..2"]
    assert {"work", "call_modules", "training"} <= {*dir(made.step)}
    for number, path in enumerate(calls[2:]):
        one = made.get_submodule(path)
        torch.testing.assert_close(one(X), made.step.work(X) * (0.5, 0.25, 0.1)[number])


def test_graph_modules_follow_their_modules() -> None:
    made: Any = unflatten(export_preserving(Steps().eval(), (X,)))
    made.layers[1].set_submodule("0", nn.Identity())
    view = made.layers[1].graph_module
    torch.testing.assert_close(view(X), (made.layers[1](X),))
    data = io.BytesIO()
    torch.save(made.layers[1].graph_module, data)
    loaded = torch.load(io.BytesIO(data.getvalue()), weights_only=False)
    torch.testing.assert_close(loaded(X), view(X))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: int = 2, *, shift: Any = None) -> Any:
        y = self.fc(x).view(-1, 2, 2).expand(2, 2, 2).reshape(2, 4) * scale
        return y if shift is None else (y + shift["by"], [shift["twice"][0]])


Y = torch.randn(2, 4)


@pytest.mark.parametrize(
    "name",
    ["counts thrice", "reads an old value", "norms thrice", "writes results"],
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


def test_a_constant_that_a_trace_would_ignore_is_refused() -> None:
    module = unflatten(export(Scaled(), (Y, 3)))
    with pytest.raises(InputConstraintError, match=r"'scale' of .* constant 3; .*concrete_args"):
        symbolic_trace(module)
    with pytest.raises(InputConstraintError, match=r"'scale' of .* constant 3; found 4"):
        symbolic_trace(module, {"scale": 4})
