"""An unflattened module compiles as one graph, with every backend, for inference and training."""

from __future__ import annotations

import copy
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export

from lowerdeck.unflatten import InputConstraintError, unflatten

if TYPE_CHECKING:

    class Model(nn.Module):
        """A module whose attributes may be anything."""

        def __getattr__(self, name: str) -> Any: ...

else:
    Model = nn.Module

# torch's own deprecations while it compiles.
pytestmark = pytest.mark.filterwarnings("ignore")

_HAS_COMPILER = shutil.which("g++") is not None or shutil.which("clang++") is not None


class Expert(Model):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x: Tensor, use_a: bool) -> Any:
        return self.a(x) if use_a else self.b(x)


class Net(Model):
    """Specialised and repeated calls, state, regions of other modes, structures."""

    def __init__(self) -> None:
        super().__init__()
        self.expert = Expert()
        self.bn = nn.BatchNorm1d(4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, pair: tuple[Tensor, Tensor], *, scale: Tensor) -> Any:
        x = self.bn(pair[0])
        with torch.no_grad():
            factor = self.expert(pair[1], True).sigmoid()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.expert(x, False)
        self.seen.add_(1)
        return {"sum": (self.expert(x, True) * factor + y.float()) * scale + self.seen, "x": x}


ARGS = ((torch.randn(3, 4), torch.randn(3, 4)),)
KWARGS = {"scale": torch.tensor(0.5)}


def _check(backend: str) -> None:
    torch._dynamo.reset()
    eager = Net()
    preserved = {"preserve_module_call_signature": ("bn",)}
    for options in ({}, preserved):
        theirs = copy.deepcopy(eager)
        module = unflatten(export(copy.deepcopy(eager), ARGS, KWARGS, **options))  # type: ignore[arg-type]
        compiled: Any = torch.compile(module, fullgraph=True, backend=backend)
        for _ in range(2):
            found, expected = compiled(*ARGS, **KWARGS), theirs(*ARGS, **KWARGS)
            torch.testing.assert_close(found, expected)
            found["sum"].sum().backward()
            expected["sum"].sum().backward()
        for name, value in theirs.named_parameters():
            mine = module.get_parameter(name).grad
            torch.testing.assert_close(mine, value.grad, atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(dict(module.named_buffers()), dict(theirs.named_buffers()))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_as_one_graph(backend: str) -> None:
    _check(backend)


@pytest.mark.heavy
@pytest.mark.skipif(not _HAS_COMPILER, reason="inductor needs a C++ compiler; found none")
def test_compiles_with_inductor() -> None:
    _check("inductor")


def test_one_graph_serves_all_sizes() -> None:
    torch._dynamo.reset()
    eager = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    shapes = ({0: Dim("batch", min=2, max=64)},)
    module = unflatten(export(eager, (torch.randn(3, 4),), dynamic_shapes=shapes))
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled: Any = torch.compile(module, fullgraph=True, dynamic=True, backend=backend)
    for rows in (5, 7, 30):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(compiled(x), eager(x))
    assert len(graphs) == 1


def test_a_compiled_child_inside_an_uncompiled_parent() -> None:
    torch._dynamo.reset()
    eager: Any = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2))
    x = torch.randn(3, 4)
    module: Any = unflatten(export(eager, (x,)))
    module.get_submodule("0").compile(fullgraph=True, backend="eager")
    torch.testing.assert_close(module(x), eager(x))


class Scaled(nn.Module):
    def forward(self, x: Tensor, factor: float, many: list[Tensor]) -> Tensor:
        return x.reshape(-1, 4) * factor + many[0]


SCALED = (torch.ones(3, 4), 2.0, [torch.ones(4)])


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize(
    "other",
    [
        (torch.ones(3, 4), 3.0, [torch.ones(4)]),
        (torch.ones(3, 4), -2.0, [torch.ones(4)]),
        (torch.ones(3, 4), 2, [torch.ones(4)]),
        (torch.ones(3, 2, 4), 2.0, [torch.ones(4)]),
        (torch.ones(3, 8), 2.0, [torch.ones(4)]),
        (torch.ones(3, 4), 2.0, [torch.ones(1)]),
    ],
)
def test_the_outermost_module_refuses_what_was_not_recorded(
    other: tuple[Any, ...], fullgraph: bool
) -> None:
    dynamic = {"x": {0: torch.export.Dim("n", max=9)}, "factor": None, "many": [None]}
    program = torch.export.export(Scaled(), SCALED, dynamic_shapes=dynamic)
    module = unflatten(program)
    compiled: Any = torch.compile(module, fullgraph=fullgraph, dynamic=True, backend="eager")
    torch.testing.assert_close(compiled(*SCALED), Scaled()(*SCALED))
    larger = (torch.ones(5, 4), *SCALED[1:])
    torch.testing.assert_close(compiled(*larger), Scaled()(*larger))
    with pytest.raises(Exception, match=r"xport|dimensions") as caught:
        compiled(*other)
    # In one graph there is nobody to raise it to: the compiler says what was raised.
    assert fullgraph or isinstance(caught.value, InputConstraintError)
    module.check_input_constraints = False
    torch._dynamo.reset()
    if other[0].dim() == 2:
        compiled(*other)
