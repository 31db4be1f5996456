"""Random graph modules for the tests: multi-output operators, constants, literals, lists."""

from __future__ import annotations

import operator
import random

import torch
from hypothesis import HealthCheck, settings
from torch.fx import Graph, GraphModule, Node, symbolic_trace

from lowerdeck.graph_fuser import Region

SETTINGS = settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
"""How long properties of random graphs are looked for, the same graphs every time."""


def named(gm: GraphModule) -> dict[str, Node]:
    """Return the nodes by their names."""
    return {node.name: node for node in gm.graph.nodes}


def chain() -> tuple[GraphModule, dict[str, Node]]:
    """Return a graph of four calls in a row, and its nodes by their names."""
    gm = symbolic_trace(lambda x: (x.sin() + 1).cos().neg())
    return gm, named(gm)


def random_graph(seed: int, size: int = 20, *, inputs: int = 3) -> GraphModule:
    """Return a graph module of about ``size`` nodes that computes on vectors of four."""
    rng = random.Random(seed)
    root = torch.nn.Module()
    graph = Graph()
    values: list[Node] = [graph.placeholder(f"x{i}") for i in range(inputs)]
    for index in range(size):
        values.append(_random_node(rng, graph, root, values, index))
    picks = rng.sample(values, k=min(len(values), rng.randint(1, 4)))
    graph.output((values[-1], *picks))
    gm = GraphModule(root, graph)
    annotate(gm)
    return gm


def random_writing_graph(seed: int, size: int = 20) -> GraphModule:
    """Return a graph module that also writes in place, reads through views, and draws numbers."""
    rng = random.Random(seed)
    root = torch.nn.Module()
    root.register_buffer("state", torch.zeros(4))
    graph = Graph()
    values: list[Node] = [graph.placeholder("x0"), graph.placeholder("x1")]
    values.append(graph.get_attr("state"))
    # So that a second run starts from the same state.
    graph.call_function(torch.ops.aten.zero_.default, (values[-1],))
    for _ in range(size):
        values.append(_random_effect(rng, graph, values))
    graph.output((values[-1], *rng.sample(values, k=min(len(values), 3))))
    return GraphModule(root, graph)


def _random_effect(rng: random.Random, graph: Graph, values: list[Node]) -> Node:
    value, other = rng.choice(values), rng.choice(values)
    kind = rng.randrange(9)
    if kind == 0:
        return graph.call_function(torch.ops.aten.add_.Tensor, (value, other))
    if kind == 1:
        return graph.call_method("mul_", (value, 2))
    if kind == 2:
        return graph.call_function(torch.ops.aten.view.default, (value, [4]))
    if kind == 3:
        return graph.call_function(torch.ops.aten.rand.default, ([4],))
    if kind == 4:
        return graph.call_function(torch.rand_like, (value,))
    if kind == 5:
        return graph.call_function(torch.nn.functional.relu, (value,), {"inplace": True})
    if kind == 6:
        return graph.get_attr("state")
    binary = rng.choice([torch.ops.aten.mul.Tensor, torch.ops.aten.sub.Tensor])
    return graph.call_function(binary, (value, other))


def example_inputs(gm: GraphModule) -> list[torch.Tensor]:
    """Return fixed inputs for a random graph."""
    count = sum(node.op == "placeholder" for node in gm.graph.nodes)
    return [torch.linspace(-1.0, 1.0, 4) + i for i in range(count)]


def annotate(gm: GraphModule) -> None:
    """Give every node the value it had on the example inputs as ``val``."""
    annotate_with(gm, example_inputs(gm))


def annotate_with(gm: GraphModule, inputs: list[torch.Tensor]) -> None:
    """Give every node the value it had on ``inputs`` as ``val``."""

    class Annotator(torch.fx.Interpreter):
        def run_node(self, n: Node) -> object:
            result = super().run_node(n)
            n.meta["val"] = result
            return result

    Annotator(gm).run(*inputs)


def _random_node(
    rng: random.Random, graph: Graph, root: torch.nn.Module, values: list[Node], index: int
) -> Node:
    def pick() -> Node:
        # Recent values more often, so that graphs are deep as well as wide.
        return (
            values[-rng.randint(1, min(len(values), 6))]
            if rng.random() < 0.7
            else rng.choice(values)
        )

    kind = rng.randrange(8)
    if kind == 0:
        name = f"c{index}"
        root.register_buffer(name, torch.full((4,), float(rng.randint(1, 3))))
        return graph.get_attr(name)
    if kind == 1:
        split = graph.call_function(torch.ops.aten.split.Tensor, (pick(), 2))
        first = graph.call_function(operator.getitem, (split, 0))
        second = graph.call_function(operator.getitem, (split, 1))
        return graph.call_function(torch.ops.aten.cat.default, ([second, first],))
    if kind == 2:
        return graph.call_function(
            torch.ops.aten.stack.default, ([pick(), pick()],)
        ).graph.call_function(torch.ops.aten.sum.dim_IntList, (next(reversed(graph.nodes)), [0]))
    if kind == 3:
        return graph.call_function(torch.ops.aten.add.Tensor, (pick(), pick()), {"alpha": 2})
    if kind == 4:
        return graph.call_function(
            torch.ops.aten.clamp.default, (pick(),), {"min": None, "max": 5.0}
        )
    binary = rng.choice([torch.ops.aten.mul.Tensor, torch.ops.aten.sub.Tensor])
    if kind in {5, 6}:
        return graph.call_function(binary, (pick(), pick()))
    return graph.call_function(
        rng.choice([torch.ops.aten.sin.default, torch.ops.aten.neg.default]), (pick(),)
    )


def computing(gm: GraphModule) -> list[Node]:
    """Return the nodes of ``gm`` that may be in a region."""
    return [node for node in gm.graph.nodes if node.op not in {"placeholder", "output"}]


def random_region(rng: random.Random, nodes: list[Node], name: str, depth: int) -> Region:
    """Return a region of ``nodes`` with up to four levels of regions in it."""
    children: list[Region] = []
    own = nodes
    if depth < 4 and len(nodes) > 4:
        cuts = sorted(rng.sample(range(len(nodes)), k=rng.choice([2, 4])))
        for number in range(0, len(cuts), 2):
            inside = nodes[cuts[number] : cuts[number + 1]]
            if rng.random() < 0.3:
                inside = [node for node in inside if rng.random() < 0.9]
            if inside:
                children.append(random_region(rng, inside, f"m{number}", depth + 1))
                taken = set(inside)
                own = [node for node in own if node not in taken]
    return Region(name, own, children, always_return_tuple=rng.random() < 0.3)
