"""Small and random graphs, regions and node lists for them.

Random graphs compute on vectors of four, so that any of them can be run.
"""

from __future__ import annotations

import operator
import random
import sys
from collections.abc import Callable, Sequence

import torch
from torch.fx import Graph, GraphModule, Node, symbolic_trace

from lowerdeck.graph_fuser import Region
from lowerdeck.graph_fuser.order.hazards import order_hazards

aten = torch.ops.aten
CONSTANT = torch.linspace(-1.0, 1.0, 4)


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

    class Annotator(torch.fx.Interpreter):
        def run_node(self, n: Node) -> object:
            n.meta["val"] = super().run_node(n)
            return n.meta["val"]

    Annotator(gm).run(*inputs_of(gm))
    return gm


def inputs_of(gm: GraphModule) -> list[torch.Tensor]:
    """Return fixed inputs, new ones at each call."""
    count = sum(node.op == "placeholder" for node in gm.graph.nodes)
    return [torch.linspace(-1.0, 1.0, 4) + number for number in range(count)]


def results(gm: GraphModule) -> tuple[torch.Tensor, ...]:
    """Return what ``gm`` computes for fixed inputs, state and random numbers."""
    for name, buffer in gm.named_buffers():
        if name.endswith(("constant", "state")):
            buffer.copy_(CONSTANT if name.endswith("constant") else torch.zeros(4))
    torch.manual_seed(0)
    return tuple(value.clone() for value in gm(*inputs_of(gm)))


def same_results(gm: GraphModule, expected: tuple[torch.Tensor, ...]) -> None:
    """Raise AssertionError unless ``gm`` is valid and computes what ``results`` gave before."""
    gm.graph.lint()
    torch.testing.assert_close(results(gm), expected, rtol=0, atol=0, equal_nan=True)


def count_calls(action: Callable[[], object]) -> int:
    """Return how many Python and C functions ``action`` calls."""
    count = 0

    def count_call(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event in {"call", "c_call"}

    sys.setprofile(count_call)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


def moved(gm: GraphModule, rng: random.Random, count: int) -> GraphModule:
    """Return ``gm`` after ``count`` of its nodes were moved after any other one."""
    nodes = [node for node in gm.graph.nodes if node.op != "output"]
    for node in rng.sample(nodes, k=min(len(nodes), count)):
        rng.choice(nodes).append(node)
    return gm


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
        split = graph.call_function(aten.split.Tensor, (pick(), 2))
        first = graph.call_function(operator.getitem, (split, 0))
        second = graph.call_function(operator.getitem, (split, 1))
        return graph.call_function(aten.cat.default, ([second, first],))
    if kind == 2:
        return graph.call_function(aten.stack.default, ([pick(), pick()],)).graph.call_function(
            aten.sum.dim_IntList, (next(reversed(graph.nodes)), [0])
        )
    if kind == 3:
        return graph.call_function(aten.add.Tensor, (pick(), pick()), {"alpha": 2})
    if kind == 4:
        return graph.call_function(aten.clamp.default, (pick(),), {"min": None, "max": 5.0})
    binary = rng.choice([aten.mul.Tensor, aten.sub.Tensor])
    if kind in {5, 6}:
        return graph.call_function(binary, (pick(), pick()))
    return graph.call_function(rng.choice([aten.sin.default, aten.neg.default]), (pick(),))


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


def tied_graph(rng: random.Random, size: int) -> GraphModule:
    """Return a graph module of about ``size`` nodes; it may have no input at all."""
    root = torch.nn.Module()
    root.register_buffer("constant", CONSTANT.clone())
    root.register_buffer("state", torch.zeros(4))
    graph = Graph()
    values = [graph.placeholder(f"x{number}") for number in range(rng.randrange(4))]
    if not values or rng.random() < 0.3:
        values.append(graph.get_attr("constant"))
    # Of a deep graph each node reads what came last, of a wide one whatever came before.
    reach = rng.choice([2, 6, 20, size])
    effects = rng.choice([0.0, 0.05, 0.3])
    if effects:
        state = graph.get_attr("state")
        graph.call_function(aten.zero_.default, (state,))
        values.append(state)
    while len(graph.nodes) < size:
        make = _effect if rng.random() < effects else _pure
        values.append(make(rng, graph, values[-reach:]))
    graph.output((values[-1], *rng.sample(values, k=min(len(values), rng.randrange(4)))))
    return GraphModule(root, graph)


def _pure(rng: random.Random, graph: Graph, values: Sequence[Node]) -> Node:
    value, other = rng.choice(values), rng.choice(values)
    kind = rng.randrange(8)
    if kind == 0:
        return graph.get_attr("constant")
    if kind == 1:
        parts = graph.call_function(aten.split.Tensor, (value, 2))
        first, second = (graph.call_function(operator.getitem, (parts, i)) for i in (0, 1))
        return graph.call_function(aten.cat.default, ([second, first],))
    if kind == 2:
        return graph.call_function(aten.view.default, (value, [4]))
    if kind == 3:
        return graph.call_function(aten.sin.default, (value,))
    return graph.call_function(rng.choice([aten.add.Tensor, aten.sub.Tensor]), (value, other))


def _effect(rng: random.Random, graph: Graph, values: Sequence[Node]) -> Node:
    value, other = rng.choice(values), rng.choice(values)
    kind = rng.randrange(4)
    if kind == 0:
        return graph.call_function(aten.rand.default, ([4],))
    if kind == 1:
        return graph.call_function(aten.mul_.Tensor, (value, 0.5))
    if kind == 2:
        parts = graph.call_function(aten.split.Tensor, (value, 2))
        early = graph.call_function(operator.getitem, (parts, 0))
        graph.call_function(aten.mul_.Tensor, (early, 0.5))
        late = graph.call_function(operator.getitem, (parts, 1))
        return graph.call_function(aten.cat.default, ([late, early],))
    return graph.call_function(aten.add_.Tensor, (value, other))


def node_lists(rng: random.Random, gm: GraphModule) -> dict[str, list[Node]]:
    """Return disjoint lists of nodes: some sure to be possible, some sure not, some either."""
    if rng.random() < 0.6:
        return _possible_lists(rng, gm)
    nodes = [node for node in gm.graph.nodes if node.op not in {"placeholder", "output"}]
    count = rng.randint(2, max(3, len(nodes) // 4))
    spread = rng.choice([0, 1, count])
    share = rng.choice([0.4, 0.9])
    found: dict[str, list[Node]] = {}
    for number, node in enumerate(nodes):
        if rng.random() < share:
            own = number * count // len(nodes) + rng.randint(-spread, spread)
            found.setdefault(f"p{min(count - 1, max(0, own))}", []).append(node)
    return found


def _possible_lists(rng: random.Random, gm: GraphModule) -> dict[str, list[Node]]:
    """Return stretches of another order that the graph could have had: each can be one call."""
    order = [node for node in _random_order(rng, gm) if node.op not in {"placeholder", "output"}]
    found: dict[str, list[Node]] = {}
    longest = rng.choice([2, 4, 12])
    while order:
        length = rng.randint(1, longest)
        if rng.random() < 0.8:
            found[f"p{len(found)}"] = rng.sample(order[:length], k=min(length, len(order)))
        order = order[length:]
    return found


def _random_order(rng: random.Random, gm: GraphModule) -> list[Node]:
    after = {node: list(node.users) for node in gm.graph.nodes}
    for first, second in order_hazards(gm.graph, gm):
        after[first].append(second)
    waits = dict.fromkeys(after, 0)
    for targets in after.values():
        for target in targets:
            waits[target] += 1
    ready = [node for node, count in waits.items() if not count]
    order: list[Node] = []
    # Depth first now and then: lists then hold what is far apart in the graph.
    deep = rng.random()
    while ready:
        node = ready.pop(-1 if rng.random() < deep else rng.randrange(len(ready)))
        order.append(node)
        for target in after[node]:
            waits[target] -= 1
            if not waits[target]:
                ready.append(target)
    return order
