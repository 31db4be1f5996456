"""Graphs of equal structure are written as one source, and no others are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import export
from torch.fx import Graph, GraphModule

from lowerdeck.graph_fuser import OutlinePlan, Region, plan_outline
from lowerdeck.unflatten import unflatten
from lowerdeck.unflatten.code.code import write_source
from lowerdeck.unflatten.trace.structure import region_structure

BORDER = {"placeholder", "output"}


def _graph(
    *args: Any,
    target: Any = torch.ops.aten.add.Tensor,
    uses: int = 1,
    kwargs: dict[str, Any] | None = None,
    meta: dict[str, Any] | None = None,
    attribute: str = "weight",
    prefix: str = "",
) -> Graph:
    graph = Graph()
    x = graph.placeholder(f"{prefix}x")
    y = graph.get_attr(attribute)
    node = graph.create_node("call_function", target, (x, y, *args), kwargs or {}, f"{prefix}node")
    node.meta.update(meta or {})
    for _ in range(uses):
        graph.call_function(torch.relu, (node,))
    graph.output((node,))
    return graph


DIFFERENT: list[Callable[[], Graph]] = [
    _graph,
    lambda: _graph(1),
    lambda: _graph(1.0),
    lambda: _graph(True),
    lambda: _graph("1"),
    lambda: _graph(0.0),
    lambda: _graph(-0.0),
    lambda: _graph(None),
    lambda: _graph((1,)),
    lambda: _graph([1]),
    lambda: _graph([1, 2]),
    lambda: _graph([[1], 2]),
    lambda: _graph({"a": 1}),
    lambda: _graph(slice(0, 1)),
    lambda: _graph(torch.float32),
    lambda: _graph(torch.float64),
    lambda: _graph(torch.device("cpu")),
    lambda: _graph(kwargs={"alpha": 1}),
    lambda: _graph(kwargs={"alpha": 2}),
    lambda: _graph(kwargs={"beta": 2}),
    lambda: _graph(target=torch.ops.aten.sub.Tensor),
    lambda: _graph(uses=2),
    lambda: _graph(attribute="bias"),
    lambda: _graph(meta={"stack_trace": 'File "a.py", line 1, in f\n    x + y\n'}),
    lambda: _graph(meta={"closes": "a"}),
]


def _planned(graph: Graph) -> tuple[OutlinePlan, Region]:
    """Return a plan that makes one call of all that ``graph`` computes."""
    region = Region("all", [node for node in graph.nodes if node.op not in BORDER])
    return plan_outline(GraphModule({"weight": None, "bias": None}, graph), [region]), region


def _structure(graph: Graph) -> object:
    return region_structure(*_planned(graph), {})


def test_what_is_written_differently_has_another_structure() -> None:
    graphs = [make() for make in DIFFERENT]
    structures = [_structure(graph) for graph in graphs]
    assert len(set(structures)) == len(DIFFERENT)


@pytest.mark.parametrize("make", DIFFERENT)
def test_names_of_nodes_do_not_count(make: Callable[[], Graph]) -> None:
    one, other = make(), make()
    for node in other.nodes:
        node._rename(f"another_{node.name}")
    (plan, region), (other_plan, other_region) = _planned(one), _planned(other)
    assert region_structure(plan, region, {}) == region_structure(other_plan, other_region, {})
    built = plan.graph(region).graph
    assert write_source(built).text == write_source(other_plan.graph(other_region).graph).text
    # What is built later is what would have been built at once.
    later = other_plan.defer(other_region, built).build()
    assert (
        later.python_code("self").src
        == other_plan.graph(other_region).graph.python_code("self").src
    )


class Block(nn.Module):
    """Two layers with a slope of its own."""

    def __init__(self, slope: float) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.slope = slope

    def forward(self, x: torch.Tensor) -> Any:
        return self.fc(x) * self.slope + x


def test_modules_of_equal_code_share_it_and_others_do_not() -> None:
    eager = nn.Sequential(Block(0.5), Block(-0.0), Block(0.5), Block(0.0))
    x = torch.randn(3, 2)
    module: Any = unflatten(export(eager, (x,)))
    codes = [type(block).forward for block in module.children()]
    assert codes[0] is codes[2]
    assert len({id(code) for code in codes}) == 3
    torch.testing.assert_close(module(x), eager(x))
    # What they share is the code, not the graph.
    first, _, third, _ = module.children()
    mul = next(n for n in first.graph.nodes if n.target is torch.ops.aten.mul.Tensor)
    mul.args = (mul.args[0], 2.0)
    first.recompile()
    torch.testing.assert_close(first(x), first.fc(x) * 2 + x)
    torch.testing.assert_close(third(x), eager[2](x))
